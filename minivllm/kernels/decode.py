"""Paged decode attention in Triton: one new token a row, the context cut into splits.

Owns the kernel of `ops.attention.paged_decode` and the one that combines the splits. All query
heads of a KV head share a tile: its keys and values are read once. Lesson 13.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minivllm.kernels.attention_tile import attend_tile, cache_rows
from minivllm.kernels.decode_fp8 import decode_fp8_kernel
from minivllm.kernels.runtime import begin, capability, check_device, check_inner, overlaps, padded
from minivllm.kernels.splits import combine_kernel, split_size
from minivllm.kernels.tiles import Tile, decode_splits, padded_dim, select_tile


# Another max_model_len is another table width, and must not compile the kernel again.
@triton.jit(do_not_specialize=["stride_table"])
def decode_kernel(
    p_q,
    p_k,
    p_v,
    p_tables,
    p_lens,
    p_out,
    p_partial,
    p_lse,
    stride_q,
    stride_table,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    S: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[b, h] = softmax(q[b, h] k^T scale) v over tokens 0..len[b]-1, h of one KV head

    With splits: the same over a part of the tokens, and the logarithm (base 2) of its sum.
    """
    begin(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(p_lens + row)
    size = split_size(length, SPLITS, BLOCK_N)
    start = split * size
    end = tl.minimum(start + size, length)
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_o = (o_g < GROUP)[:, None] & (o_d < DIM)[None, :]
    # [G, D]; first query head of the group, in rows of [B Hq, D]
    o_head = row * HEADS * GROUP + head * GROUP + o_g
    if start >= end:
        if SPLITS == 1:  # a pad row
            b_zero = tl.zeros((BLOCK_G, BLOCK_D), p_out.dtype.element_ty)
            tl.store(p_out + o_head[:, None] * DIM + o_d[None, :], b_zero, mask=m_o)
        return

    # [G, D]
    o_q = row * stride_q + (head * GROUP + o_g)[:, None] * DIM + o_d[None, :]
    b_q = tl.load(p_q + o_q, mask=m_o, other=0.0)
    b_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_G,), tl.float32)
    b_acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    p_table = p_tables + row * stride_table
    # Only the last tile can be cut short: peeled, it leaves a loop without a single mask.
    whole = start + (end - start) // BLOCK_N * BLOCK_N
    m_n = tl.full((BLOCK_N,), True, tl.int1)
    for n in range(start, whole, BLOCK_N):
        rows = cache_rows(p_table, n, end, head, HEADS, S, BLOCK_N, False)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, p_k, p_v, None, None, rows, m_n, m_n[None, :],
            scale, DIM, BLOCK_D, False, False,
        )  # fmt: skip
    if whole < end:
        m_n = whole + tl.arange(0, BLOCK_N) < end
        rows = cache_rows(p_table, whole, end, head, HEADS, S, BLOCK_N, True)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, p_k, p_v, None, None, rows, m_n, m_n[None, :],
            scale, DIM, BLOCK_D, True, False,
        )  # fmt: skip

    b_out = b_acc / b_sum[:, None]
    if SPLITS == 1:
        b_out = b_out.to(p_out.dtype.element_ty)
        tl.store(p_out + o_head[:, None] * DIM + o_d[None, :], b_out, mask=m_o)
    else:
        o_part = o_head * SPLITS + split
        tl.store(p_partial + o_part[:, None] * DIM + o_d[None, :], b_out, mask=m_o)
        tl.store(p_lse + o_part, b_max + tl.log2(b_sum), mask=o_g < GROUP)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.attention.paged_decode`. q: [B, Hq, D] -> [B, Hq, D]; pad rows give zeros.

    k_scale, v_scale: [N, S, Hkv] float32, for a float8_e4m3fn cache.
    """
    kv_heads = k_cache.shape[2]
    splits = decode_splits(max(len(q), 1), kv_heads)
    tile = select_tile(
        "decode", capability(q.device), q.shape[2], q.element_size(), k_cache.element_size(),
        q.shape[1] // kv_heads, splits,
    )  # fmt: skip
    caches = (k_cache, v_cache, k_scale, v_scale)
    return launch_decode(q, caches, block_tables, context_lens, scale, tile, splits)


def launch_decode(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    tile: Tile,
    splits: int,
) -> torch.Tensor:
    """`paged_decode` with a given tile and number of splits; benchmarks compare them."""
    k_cache, v_cache, k_scale, v_scale = caches
    check_device("paged_decode", q, k_cache, v_cache, block_tables, context_lens)
    check_inner("paged_decode", q, 2)
    rows, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    partial = lse = None
    if splits > 1:
        partial = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    # Half a head is a side of the 8-bit products, and the least side is 16.
    block_d, pdl = max(padded_dim(dim), 16 if k_scale is None else 32), overlaps(q.device)
    # Heads first: neighbouring programs read neighbouring bytes of the same tokens.
    grid = (kv_heads, splits, rows)
    shared = (
        block_tables, context_lens, out, partial, lse,
        q.stride(0), block_tables.stride(0), scale * math.log2(math.e),
        kv_heads, heads // kv_heads, dim, block_size, splits,
        tile.block_m, tile.block_n, block_d, pdl,
    )  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": pdl}
    if k_scale is None:
        decode_kernel[grid](q, k_cache, v_cache, *shared, **options)
    else:
        pairs = (k_cache.view(torch.int16), v_cache.view(torch.int16))
        decode_fp8_kernel[grid](q, *pairs, k_scale, v_scale, *shared, **options)
    if splits > 1:
        combine_kernel[(heads, rows)](
            partial, lse, context_lens, out,
            heads, dim, splits, tile.block_n, padded(splits), block_d, pdl,
            num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out
