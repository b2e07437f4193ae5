"""The inner step of both attention kernels: one tile of cached tokens into a running softmax.

Owns the update (Milakov and Gimelshein, 2018; FlashAttention: Dao, 2022) and the way from a token's
position to its row of the paged cache. Lesson 13.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 8-bit values are multiplied in float16, whose smallest numbers are too coarse for a small
# probability times a small scale. The power of two is taken out again, exactly, at the end.
FP8_LIFT = tl.constexpr(256.0)


@triton.jit
def cache_rows(
    p_table,
    first,
    end,
    head,
    HEADS: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows of the cache, seen as [N S Hkv, D], of tokens first..first+N-1: [N] int64.

    MASKED: tokens from `end` on have no block; their rows are never read.
    """
    o_n = first + tl.arange(0, N)
    if S % N == 0:
        # The tile lies in one block: a single number to look up.
        block = tl.load(p_table + first // S).to(tl.int64)
        slot = block * S + o_n % S
    else:
        # [N]; neighbours look up the same number, which costs no traffic.
        if MASKED:
            block = tl.load(p_table + o_n // S, mask=o_n < end, other=0).to(tl.int64)
        else:
            block = tl.load(p_table + o_n // S).to(tl.int64)
        slot = block * S + o_n % S
    return slot * HEADS + head


@triton.jit
def _load(p_cache, rows, m_n, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[N, D] of the cache; masks only where they can matter, for they cost address arithmetic."""
    o_d = tl.arange(0, BLOCK_D)
    p_tile = p_cache + rows[:, None] * DIM + o_d[None, :]
    if MASKED:
        return tl.load(p_tile, mask=m_n[:, None] & (o_d < DIM)[None, :], other=0.0)
    if DIM < BLOCK_D:
        return tl.load(p_tile, mask=(o_d < DIM)[None, :], other=0.0)
    return tl.load(p_tile)


@triton.jit
def attend_tile(
    b_q,
    b_max,
    b_sum,
    b_acc,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    rows,
    m_n,
    m_s,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
):
    """s = q k^T scale;  m' = max(m, s);  p = 2^(s - m')
    sum' = sum 2^(m - m') + p;  acc' = acc 2^(m - m') + p v

    b_q: [M, D]; b_max, b_sum: [M]; b_acc: [M, D]; rows, m_n: [N]; m_s: [M, N] (or [1, N]).
    `scale` holds log2(e): the hardware's exponential is a power of two. It multiplies in float32,
    as part of an instruction that is there anyway; in q it would be rounded to 8 bits.
    """
    # [N, D]
    b_k = _load(p_k, rows, m_n, DIM, BLOCK_D, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee") * scale
    if FP8:
        # [N]: one scale a token, so it can wait until after the product.
        if MASKED:
            b_s *= tl.load(p_k_scale + rows, mask=m_n, other=0.0)[None, :]
        else:
            b_s *= tl.load(p_k_scale + rows)[None, :]
    if MASKED:
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    b_p = tl.exp2(b_s - b_new_max[:, None])
    b_shrink = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
    # [N, D]
    b_v = _load(p_v, rows, m_n, DIM, BLOCK_D, MASKED)
    if FP8:
        # [N]
        if MASKED:
            b_p *= tl.load(p_v_scale + rows, mask=m_n, other=0.0)[None, :] * FP8_LIFT
        else:
            b_p *= tl.load(p_v_scale + rows)[None, :] * FP8_LIFT
    b_acc = b_acc * b_shrink[:, None]
    b_acc = tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc, input_precision="ieee")
    return b_new_max, b_sum, b_acc
