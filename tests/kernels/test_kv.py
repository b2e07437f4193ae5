"""The cache's store against `ops.kv` and `ops.kv_fp8`."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HALF_TYPES, close_8_bit

from minivllm.ops import kv, kv_fp8


def caches(device, dtype, dim, heads=2):
    # The cache is the middle of a larger tensor: what is around it must stay as it is.
    return torch.full((6, 16, heads, dim), 7.0, device=device).to(dtype)


def inputs(device, dtype, dim, heads=2):
    packed = torch.randn(4, 3 * heads * dim, dtype=dtype, device=device)
    k, v = (
        packed[:, i * heads * dim :][:, : heads * dim].unflatten(1, (heads, dim)) for i in (0, 2)
    )
    return k, v, torch.tensor([5, -1, 0, 63], device=device)


def check(device, dtype, dim):
    from minivllm.kernels.kv import store_kv

    k, v, slots = inputs(device, dtype, dim)
    got, expected = caches(device, dtype, dim), caches(device, dtype, dim)
    got_v, expected_v = got.clone(), expected.clone()
    store_kv(k, v, got[1:5], got_v[1:5], slots)
    kv.store_kv(k, v, expected[1:5], expected_v[1:5], slots)
    assert torch.equal(got, expected) and torch.equal(got_v, expected_v)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("dim", [16, 80])
def test_equals_the_torch_form(device, dtype, dim):
    check(device, dtype, dim)


def check_8_bit(device, dtype, dim):
    from minivllm.kernels.kv import store_kv

    k, v, slots = inputs(device, dtype, dim)
    k[0] = 0  # a head of zeros has no largest number to scale by
    results = []
    for store in (store_kv, kv_fp8.store_kv):
        k_cache = torch.zeros(4, 16, 2, dim, dtype=torch.float8_e4m3fn, device=device)
        v_cache, scales = torch.zeros_like(k_cache), torch.zeros(2, 4, 16, 2, device=device)
        store(k, v, k_cache, v_cache, slots, *scales)
        results.append((k_cache.float(), v_cache.float(), scales))
    (k_got, v_got, scales_got), (k_expected, v_expected, scales_expected) = results
    torch.testing.assert_close(scales_got, scales_expected, rtol=1e-6, atol=0)
    for got, expected in ((k_got, k_expected), (v_got, v_expected)):
        close_8_bit(got, expected)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("dim", [16, 80])
def test_8_bit_store(device, dtype, dim):
    check_8_bit(device, dtype, dim)


def test_a_transposed_input_is_refused(device):
    from minivllm.kernels.kv import store_kv

    k = torch.randn(4, 16, 2, device=device).transpose(1, 2)
    cache = caches(device, torch.float32, 16)
    with pytest.raises(ValueError, match="contiguous"):
        store_kv(k, k, cache, cache, torch.zeros(4, dtype=torch.int64, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
def test_shapes_of_models(gpu, dtype, dim):
    check(gpu, dtype, dim)
    if torch.cuda.get_device_capability() >= (8, 9):
        check_8_bit(gpu, dtype, dim)


@pytest.mark.gpu
def test_64_bit_addresses(gpu):
    """A cache of more than 2^31 elements: the last slot is really the last."""
    from minivllm.kernels.kv import store_kv

    blocks = 2**31 // (16 * 8 * 128) + 8
    cache = torch.zeros(blocks, 16, 8, 128, dtype=torch.float16, device=gpu)
    k = torch.randn(1, 8, 128, dtype=torch.float16, device=gpu)
    store_kv(k, k, cache, cache, torch.tensor([blocks * 16 - 1], device=gpu))
    assert torch.equal(cache[-1, -1], k[0])
