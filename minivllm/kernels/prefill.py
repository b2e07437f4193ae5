"""Prefill attention over the paged cache in Triton, for sequences of any lengths in one launch.

Owns the kernel of `ops.compose.compose_prefill_attention`. Keys and values come from the cache,
this step's included, so that whole prompts, chunks and prefix hits are one case. Lesson 13.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from minivllm.kernels.attention_tile import FP8_LIFT, attend_tile, cache_rows
from minivllm.kernels.runtime import begin, capability, check_device, check_inner, overlaps
from minivllm.kernels.tiles import Tile, padded_dim, select_tile


@triton.jit
def _row_of(p_bounds, tile, num_rows, BLOCK_M: tl.constexpr):
    """The row whose tokens a tile holds, by halving; the last row for tiles behind all tokens.

    Row r's tiles begin at number bounds[r] // BLOCK_M + r, which leaves room for a broken tile in
    every row: the grid then depends on the numbers of tokens and rows alone, as a captured graph
    needs it, and no list of tiles has to be sent (vLLM's unified attention numbers them so too).
    """
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(p_bounds + middle) // BLOCK_M + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def _prefill_kernel(
    p_q,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_tables,
    p_lens,
    p_bounds,
    p_out,
    num_rows,
    stride_q,
    stride_table,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h] = softmax(q[t, h] k^T scale) v over tokens 0..position[t] of t's sequence"""
    begin(PDL)
    q_head = tl.program_id(1)
    row = _row_of(p_bounds, tl.program_id(0), num_rows, BLOCK_M).to(tl.int64)
    first_token = tl.load(p_bounds + row)
    num_queries = tl.load(p_bounds + row + 1) - first_token
    # Last tile first: it has the most tokens to look at, and should not start when others end.
    number = tl.program_id(0) - (first_token // BLOCK_M + row).to(tl.int32)
    tile = tl.cdiv(num_queries, BLOCK_M) - 1 - number
    if tile < 0:
        return
    length = tl.load(p_lens + row)
    o_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < num_queries
    o_position = length - num_queries + o_m  # [M]
    o_d = tl.arange(0, BLOCK_D)
    m_q = m_m[:, None] & (o_d < DIM)[None, :]
    o_token = (first_token + o_m).to(tl.int64)
    # [M, D]
    o_q = o_token[:, None] * stride_q + q_head * DIM + o_d[None, :]
    b_q = tl.load(p_q + o_q, mask=m_q, other=0.0)
    if FP8:
        b_q = b_q.to(tl.float16)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    p_table = p_tables + row * stride_table
    head = q_head // GROUP
    # Tokens before the tile's first query are seen by all of its queries: no mask there.
    first_position = length - num_queries + tile * BLOCK_M
    whole = (first_position + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + BLOCK_M, length)
    m_n = tl.full((BLOCK_N,), True, tl.int1)
    for n in range(0, whole, BLOCK_N):
        rows = cache_rows(p_table, n, end, head, HEADS, S, BLOCK_N, False)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, p_k, p_v, p_k_scale, p_v_scale, rows, m_n, m_n[None, :],
            scale, DIM, BLOCK_D, False, FP8,
        )  # fmt: skip
    for n in range(whole, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        m_s = o_n[None, :] <= o_position[:, None]
        rows = cache_rows(p_table, n, end, head, HEADS, S, BLOCK_N, True)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, p_k, p_v, p_k_scale, p_v_scale, rows, o_n < end, m_s,
            scale, DIM, BLOCK_D, True, FP8,
        )  # fmt: skip
    b_out = b_acc / b_sum[:, None]
    if FP8:
        b_out *= 1.0 / FP8_LIFT
    # out is dense: [T, Hq, D]
    o_out = (o_token[:, None] * (HEADS * GROUP) + q_head) * DIM + o_d[None, :]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_q)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.compose.compose_prefill_attention`. q: [T, Hq, D] -> [T, Hq, D].

    max_seqlen_q is of no use here: tiles are numbered through all rows, see `_row_of`.
    k_scale, v_scale: [N, S, Hkv] float32, for a float8_e4m3fn cache.
    """
    tile = select_tile(
        "prefill", capability(q.device), q.shape[2], q.element_size(), k_cache.element_size()
    )
    caches = (k_cache, v_cache, k_scale, v_scale)
    return launch_prefill(q, caches, block_tables, context_lens, cu_seqlens_q, scale, tile)


def launch_prefill(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    tile: Tile,
) -> torch.Tensor:
    """`prefill_attention` with a given tile; benchmarks compare them."""
    k_cache, v_cache, k_scale, v_scale = caches
    check_device("prefill_attention", q, k_cache, v_cache, block_tables, context_lens)
    check_inner("prefill_attention", q, 2)
    heads, dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tokens, rows = q.shape[0], context_lens.shape[0]
    if not (tokens and rows):
        return out
    grid = (tokens // tile.block_m + rows, heads)
    pdl = overlaps(q.device, tokens)
    _prefill_kernel[grid](
        q, k_cache, v_cache, k_scale, v_scale, block_tables, context_lens, cu_seqlens_q, out,
        rows, q.stride(0), block_tables.stride(0), scale * math.log2(math.e),
        kv_heads, heads // kv_heads, dim, block_size,
        tile.block_m, tile.block_n, padded_dim(dim), k_scale is not None, pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
