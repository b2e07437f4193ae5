"""Slots and the scatter into the paged cache."""

from __future__ import annotations

import pytest
import torch

from minivllm.ops.kv import slot_mapping, slots_of, store_kv


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_slot_mapping(block_size: int) -> None:
    table = [7, 2, 9, 0, 5]
    for start in range(5 * block_size + 1):
        for end in range(start, 5 * block_size + 1):
            slots = slot_mapping(table, start, end, block_size)
            assert len(slots) == end - start
            for position, slot in zip(range(start, end), slots, strict=True):
                block, offset = divmod(slot, block_size)
                assert block == table[position // block_size]
                assert offset == position % block_size
            assert slots_of(table, start, end, block_size).tolist() == slots
    assert slot_mapping(table, 3, 3, block_size) == []


def test_slot_mapping_beyond_the_table() -> None:
    with pytest.raises(IndexError):
        slot_mapping([3], 0, 5, 4)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_store(kv_heads: int) -> None:
    """Each token at its slot, slot -1 nowhere, every other slot untouched."""
    torch.manual_seed(0)
    k_cache, v_cache = (torch.full((4, 3, kv_heads, 5), torch.nan) for _ in range(2))
    k, v = torch.randn(6, kv_heads, 5), torch.randn(6, kv_heads, 5)
    slots = [11, -1, 0, 7, -1, 4]
    store_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for cache, new in ((k_cache, k), (v_cache, v)):
        for slot in range(12):
            stored = cache[slot // 3, slot % 3]
            if slot in slots:
                assert torch.equal(stored, new[slots.index(slot)])
            else:
                assert stored.isnan().all()


def test_only_pads() -> None:
    cache = torch.full((2, 2, 1, 4), torch.nan)
    new = torch.ones(3, 1, 4)
    store_kv(new, new, cache, cache, torch.tensor([-1, -1, -1]))
    assert cache.isnan().all()


def test_one_layer_of_the_pool() -> None:
    """The engine passes views of one big tensor: the scatter must reach it."""
    pool = torch.zeros(2, 2, 3, 4, 1, 2)  # [L, 2, N, S, Hkv, D]
    k, v = torch.ones(1, 1, 2), torch.full((1, 1, 2), 2.0)
    store_kv(k, v, pool[1][0], pool[1][1], torch.tensor([5]))
    assert torch.equal(pool[1, 0, 1, 1], torch.ones(1, 2))
    assert torch.equal(pool[1, 1, 1, 1], torch.full((1, 2), 2.0))
    assert float(pool.sum()) == 6.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    k_cache, v_cache = (torch.zeros(1, 2, 1, 2, dtype=dtype) for _ in range(2))
    k = torch.tensor([[[1.0, 2.0]]], dtype=dtype)
    store_kv(k, k + 1, k_cache, v_cache, torch.tensor([1]))
    assert torch.equal(k_cache[0, 1], k[0]) and torch.equal(v_cache[0, 1], k[0] + 1)
