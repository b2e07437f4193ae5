"""Paged caches for tests: permuted blocks, NaN where nothing is stored, and a float64 oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# (query heads, KV heads): groups of 1, 3 and 4, and one KV head for all.
HEADS = [(2, 2), (6, 2), (8, 2), (3, 1)]


def brute_force(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, start: int
) -> torch.Tensor:
    """Softmax attention in float64, one query and one head at a time."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for token in range(q.shape[0]):
        for head in range(q.shape[1]):
            seen = start + token + 1
            scores = [scale * float(q[token, head] @ k[p, head // group]) for p in range(seen)]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            for position, weight in enumerate(weights):
                out[token, head] += weight / sum(weights) * v[position, head // group]
    return out


@dataclass
class Paged:
    """Sequences in a paged cache. Slots that nobody owns hold NaN."""

    k_cache: torch.Tensor  # [N, S, Hkv, D]
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # [B, M] int32, -1 pads
    context_lens: torch.Tensor  # [B] int32
    keys: list[torch.Tensor]  # [length, Hkv, D] of each sequence
    values: list[torch.Tensor]


def make_paged(
    lengths: list[int],
    block_size: int,
    kv_heads: int,
    head_dim: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    permuted: bool = True,
    spare_columns: int = 2,
) -> Paged:
    """A cache that holds sequences of these lengths (0 is a pad row), at scattered blocks."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator) if permuted else None
    ids = torch.arange(num_blocks) if order is None else order
    shape = (num_blocks, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, math.nan), torch.full(shape, math.nan)
    tables = torch.full((len(lengths), max(counts) + spare_columns), -1, dtype=torch.int32)
    keys, values, used = [], [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = ids[used : used + count]
        used += count
        tables[row, :count] = blocks.int()
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator) for _ in range(2))
        keys.append(k.to(dtype))
        values.append(v.to(dtype))
        for position in range(length):
            block = int(blocks[position // block_size])
            k_cache[block, position % block_size] = k[position]
            v_cache[block, position % block_size] = v[position]
    lens = torch.tensor(lengths, dtype=torch.int32)
    return Paged(k_cache.to(dtype), v_cache.to(dtype), tables, lens, keys, values)
