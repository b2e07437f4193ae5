"""Paged decode attention against `ops.attention` and `ops.kv_fp8`."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HALF_TYPES, close, paged

from minivllm.kernels.tiles import Tile
from minivllm.ops import attention, kv_fp8

TILE = Tile(16, 16, 4, 1)


def check(device, dtype, dim, group, block_size, lengths, tile=None, splits=None):
    from minivllm.kernels.decode import launch_decode, paged_decode

    kv_heads = 2
    k, v, tables, lens = paged(
        lengths, dim=dim, kv_heads=kv_heads, block_size=block_size, dtype=dtype, device=device
    )
    # q is a view of packed rows, as the runner's is.
    packed = torch.randn(len(lengths), (group + 1) * kv_heads * dim, dtype=dtype, device=device)
    q = packed[:, : group * kv_heads * dim].unflatten(1, (group * kv_heads, dim))
    expected = attention.paged_decode(q, k, v, tables, lens, dim**-0.5)
    if tile is None:
        got = paged_decode(q, k, v, tables, lens, dim**-0.5)
    else:
        got = launch_decode(q, (k, v, None, None), tables, lens, dim**-0.5, tile, splits)
    close(got, expected, dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("dim", "group"), [(16, 3), (32, 1), (80, 2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_equals_the_torch_form(device, poisoned, dtype, dim, group, splits):
    # 33: one token in its last tile; 16: exactly one; 1: no whole tile; 0: a pad row.
    check(device, dtype, dim, group, 16, [33, 16, 1, 0], TILE, splits)


def test_tiles_that_gather_several_blocks(device, poisoned):
    check(device, torch.float32, 16, 2, 16, [50, 9], Tile(16, 32, 4, 1), 2)


def test_tiles_that_lie_within_a_block(device, poisoned):
    check(device, torch.float32, 16, 2, 48, [50, 96], TILE, 1)


def test_its_own_choice_of_tile_and_splits(device, poisoned):
    check(device, torch.float32, 32, 2, 16, [20])


def test_only_pad_rows(device, poisoned):
    from minivllm.kernels.decode import launch_decode

    k, v, tables, lens = paged(
        [0, 0], dim=16, kv_heads=1, block_size=16, dtype=torch.float32, device=device
    )
    q = torch.randn(2, 2, 16, device=device)
    for splits in (1, 4):
        got = launch_decode(q, (k, v, None, None), tables, lens, 0.25, TILE, splits)
        assert torch.equal(got, torch.zeros_like(got))


def run_8_bit(device, dtype, dim, group, lengths, tile, splits):
    from minivllm.kernels.decode import launch_decode

    k, v, tables, lens = paged(
        lengths, dim=dim, kv_heads=2, block_size=16, dtype=torch.float32, device=device
    )
    # Bytes that no token owns are NaN in e4m3, and their scales are NaN too.
    (k8, k_scale), (v8, v_scale) = (kv_fp8.quantize(x) for x in (k, v * 0.01))
    q = torch.randn(len(lengths), 2 * group, dim, dtype=dtype, device=device)
    expected = kv_fp8.paged_decode(q, k8, v8, tables, lens, dim**-0.5, k_scale, v_scale)
    caches = (k8, v8, k_scale, v_scale)
    got = launch_decode(q, caches, tables, lens, dim**-0.5, tile, splits)
    # The products are float16's.
    assert not got.isnan().any()
    tolerance = 1e-3 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize(("dim", "splits"), [(16, 1), (80, 2)])
def test_8_bit_cache(device, poisoned, dim, splits):
    run_8_bit(device, torch.float32, dim, 3, [33, 5, 0], TILE, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 48), (3, 256), (8, 16)])
def test_shapes_of_models(gpu, poisoned, dtype, dim, group, block_size):
    check(gpu, dtype, dim, group, block_size, [257, 31, 0, 1, 96])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("splits", [1, 4])
def test_8_bit_shapes(gpu, poisoned, dim, splits):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit numbers need compute capability 8.9")
    for tile in (Tile(16, 32, 1, 5), Tile(16, 64, 2, 5)):
        run_8_bit(gpu, torch.bfloat16, dim, 2, [300, 64, 1, 0], tile, splits)


@pytest.mark.gpu
def test_many_rows_take_one_split(gpu, poisoned):
    lengths = [(37 * row) % 90 for row in range(600)]
    check(gpu, torch.bfloat16, 64, 2, 16, lengths)
