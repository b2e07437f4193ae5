"""The choice of tiles and splits, without a card."""

from __future__ import annotations

import itertools

import pytest

from minivllm.kernels.tiles import decode_splits, select_tile, shared_memory, tile_bytes

CARDS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", CARDS)
def test_every_shape_has_a_tile_that_fits(capability):
    sizes = itertools.product(
        ("decode", "prefill"),
        (16, 32, 64, 80, 96, 128),
        ((2, 2), (4, 4), (2, 1)),
        (1, 3, 8),
        (1, 4),
    )
    for kernel, dim, (q_bytes, kv_bytes), group, splits in sizes:
        tile = select_tile(kernel, capability, dim, q_bytes, kv_bytes, group, splits)
        assert tile_bytes(tile, dim, q_bytes, kv_bytes) <= shared_memory(capability)
        assert tile.block_n % 16 == 0 and tile.block_m >= 16
        if kernel == "decode":
            assert tile.block_m >= group


def test_turing_has_small_tiles_and_no_stages():
    for kernel in ("decode", "prefill"):
        tile = select_tile(kernel, (7, 5), 128, 2, 2)
        assert tile.num_stages == 1 and tile.block_n <= 32


def test_hopper_decode_is_the_measured_choice():
    tile = select_tile("decode", (9, 0), 128, 2, 2, 2)
    assert (tile.block_n, tile.num_warps, tile.num_stages) == (32, 1, 5)


def test_a_head_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="head_dim=4096"):
        select_tile("decode", (7, 5), 4096, 2, 2)


def test_splits_depend_on_rows_and_heads_only():
    assert [decode_splits(rows, 8) for rows in (256, 128, 77, 37, 16, 4, 1)] == [
        1,
        1,
        2,
        4,
        8,
        16,
        16,
    ]
