"""Prefill attention over pages against the loop of the torch form."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HALF_TYPES, close, paged

from minivllm.ops import attention, compose, kv_fp8


def check(device, dtype, dim, group, block_size, new_and_total, fp8=False):
    from minivllm.kernels.prefill import prefill_attention

    new = [n for n, _ in new_and_total]
    k, v, tables, lens = paged(
        [total for _, total in new_and_total],
        dim=dim, kv_heads=2, block_size=block_size, dtype=torch.float32 if fp8 else dtype,
        device=device,
    )  # fmt: skip
    bounds = torch.tensor([0, *new], device=device).cumsum(0).int()
    q = torch.randn(sum(new), 2 * group, dim, dtype=dtype, device=device)
    plain = compose.compose_prefill_attention(attention.attention)
    reference, scales = plain, ()
    if fp8:
        (k, k_scale), (v, v_scale) = kv_fp8.quantize(k), kv_fp8.quantize(v)
        reference, scales = kv_fp8.prefill_attention, (k_scale, v_scale)
    args = (q, k, v, tables, lens, bounds, max(new), dim**-0.5, *scales)
    got, expected = prefill_attention(*args), reference(*args)
    if fp8:
        assert not got.isnan().any()
        torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=4e-3)
    else:
        close(got, expected, dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("dim", "group"), [(16, 3), (80, 1)])
def test_prompts_chunks_and_hits_in_one_launch(device, poisoned, dtype, dim, group):
    # A whole prompt, a later chunk, a cached prefix with one token left.
    check(device, dtype, dim, group, 16, [(18, 18), (3, 21), (1, 17)])


def test_8_bit_cache(device, poisoned):
    check(device, torch.float32, 32, 2, 16, [(18, 18), (3, 21)], fp8=True)


def test_pads_of_a_captured_launch_change_nothing(device, poisoned):
    """Rows of no tokens, at the end and between others, and tokens that belong to no row."""
    from minivllm.kernels.prefill import prefill_attention

    k, v, tables, lens = paged(
        [18, 5, 21, 5, 5], dim=16, kv_heads=1, block_size=16, dtype=torch.float32, device=device
    )
    new = torch.tensor([18, 0, 3, 0, 0], device=device)
    bounds = torch.cat((new.new_zeros(1), new.cumsum(0))).int()
    q = torch.randn(40, 2, 16, device=device)
    got = prefill_attention(q, k, v, tables, lens, bounds, 40, 0.25)
    plain = compose.compose_prefill_attention(attention.attention)
    rows = torch.tensor([0, 2], device=device)
    real = (tables[rows], lens[rows], bounds[[0, 1, 3]])
    close(got[:21], plain(q[:21], k, v, *real, 18, 0.25), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 48), (3, 256)])
def test_shapes_of_models(gpu, poisoned, dtype, dim, group, block_size):
    check(gpu, dtype, dim, group, block_size, [(200, 200), (63, 300), (1, 97), (129, 130)])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_8_bit_shapes(gpu, poisoned, dim):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit numbers need compute capability 8.9")
    check(gpu, torch.bfloat16, dim, 2, 16, [(200, 200), (63, 300), (1, 97)], fp8=True)
