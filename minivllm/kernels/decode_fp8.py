"""Paged decode attention over the 8-bit cache, in Triton.

Owns the 8-bit twin of the kernel in `decode.py`. Tensor cores take 16-bit numbers in pairs of
tokens, and single bytes of values are slow to bring there: keys and values are read as pairs of
bytes, and the even and the odd elements of a head are two matrix products. On an H200 at 256 rows
that takes 88 us where a plain conversion takes 125, and 16-bit keys and values 138. Lesson 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minivllm.kernels.attention_tile import FP8_LIFT, cache_rows
from minivllm.kernels.runtime import INTERPRET, begin
from minivllm.kernels.splits import split_size

# The interpreter runs no assembly.
ASSEMBLY = tl.constexpr(not INTERPRET)
_ASM_LOW: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, $1, 0x0020; mov.b32 {l, h}, t;"
    " cvt.rn.f16x2.e4m3x2 $0, l; }"
)
_ASM_HIGH: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, $1, 0x0031; mov.b32 {l, h}, t;"
    " cvt.rn.f16x2.e4m3x2 $0, l; }"
)


@triton.jit
def split_pairs(b_pair):
    """Pairs of e4m3 numbers as int16 -> (first, second) of each pair, float16.

    Two instructions for two numbers: gather the bytes of neighbours, convert both. Triton's own
    conversion, the other branch, takes half as many again.
    """
    if ASSEMBLY:
        b_low = tl.inline_asm_elementwise(
            _ASM_LOW, "=r,r", [b_pair], dtype=tl.float16, is_pure=True, pack=2
        )
        b_high = tl.inline_asm_elementwise(
            _ASM_HIGH, "=r,r", [b_pair], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        b_low = b_pair.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b_high = (b_pair >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return b_low, b_high


@triton.jit
def _attend_pairs(
    b_q0, b_q1, b_max, b_sum, b_acc0, b_acc1, p_k, p_v, p_k_scale, p_v_scale, rows, m_n, scale,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`attention_tile.attend_tile`, q and the accumulator split into even and odd elements."""
    o_h = tl.arange(0, BLOCK_H)
    o_tile = rows[:, None] * HALF + o_h[None, :]
    # [N, D/2], [N], [N, D/2], [N]
    if MASKED:
        m_tile = m_n[:, None] & (o_h < HALF)[None, :]
        b_k = tl.load(p_k + o_tile, mask=m_tile, other=0)
        b_k_scale = tl.load(p_k_scale + rows, mask=m_n, other=0.0)
        b_v = tl.load(p_v + o_tile, mask=m_tile, other=0)
        b_v_scale = tl.load(p_v_scale + rows, mask=m_n, other=0.0)
    elif HALF < BLOCK_H:
        m_tile = (o_h < HALF)[None, :]
        b_k = tl.load(p_k + o_tile, mask=m_tile, other=0)
        b_k_scale = tl.load(p_k_scale + rows)
        b_v = tl.load(p_v + o_tile, mask=m_tile, other=0)
        b_v_scale = tl.load(p_v_scale + rows)
    else:
        b_k = tl.load(p_k + o_tile)
        b_k_scale = tl.load(p_k_scale + rows)
        b_v = tl.load(p_v + o_tile)
        b_v_scale = tl.load(p_v_scale + rows)
    b_k0, b_k1 = split_pairs(b_k)
    b_s = tl.dot(b_q0, tl.trans(b_k0))
    b_s = tl.dot(b_q1, tl.trans(b_k1), b_s) * (b_k_scale * scale)[None, :]
    if MASKED:
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, axis=1))
    b_p = tl.exp2(b_s - b_new_max[:, None])
    b_shrink = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_shrink + tl.sum(b_p, axis=1)
    b_p = (b_p * (b_v_scale * FP8_LIFT)[None, :]).to(tl.float16)
    b_v0, b_v1 = split_pairs(b_v)
    b_acc0 = tl.dot(b_p, b_v0, b_acc0 * b_shrink[:, None])
    b_acc1 = tl.dot(b_p, b_v1, b_acc1 * b_shrink[:, None])
    return b_new_max, b_sum, b_acc0, b_acc1


@triton.jit(do_not_specialize=["stride_table"])
def decode_fp8_kernel(
    p_q, p_k, p_v, p_k_scale, p_v_scale, p_tables, p_lens, p_out, p_partial, p_lse,
    stride_q, stride_table, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, S: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `decode.decode_kernel`; p_k, p_v: int16, two numbers each; scales: one a token and head"""
    begin(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(p_lens + row)
    size = split_size(length, SPLITS, BLOCK_N)
    start = split * size
    end = tl.minimum(start + size, length)
    HALF: tl.constexpr = DIM // 2
    BLOCK_H: tl.constexpr = BLOCK_D // 2
    o_g, o_h = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_H)
    m_o = (o_g < GROUP)[:, None] & (o_h < HALF)[None, :]
    o_head = row * HEADS * GROUP + head * GROUP + o_g
    o_out = o_head[:, None] * DIM + o_h[None, :] * 2
    if start >= end:
        if SPLITS == 1:  # a pad row
            b_zero = tl.zeros((BLOCK_G, BLOCK_H), p_out.dtype.element_ty)
            tl.store(p_out + o_out, b_zero, mask=m_o)
            tl.store(p_out + o_out + 1, b_zero, mask=m_o)
        return

    # [G, D/2], [G, D/2]
    o_q = row * stride_q + (head * GROUP + o_g)[:, None] * DIM + o_h[None, :] * 2
    b_q0 = tl.load(p_q + o_q, mask=m_o, other=0.0).to(tl.float16)
    b_q1 = tl.load(p_q + o_q + 1, mask=m_o, other=0.0).to(tl.float16)
    b_max = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_G,), tl.float32)
    b_acc0 = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    b_acc1 = tl.zeros((BLOCK_G, BLOCK_H), tl.float32)
    p_table = p_tables + row * stride_table
    whole = start + (end - start) // BLOCK_N * BLOCK_N
    m_n = tl.full((BLOCK_N,), True, tl.int1)
    for n in range(start, whole, BLOCK_N):
        rows = cache_rows(p_table, n, end, head, HEADS, S, BLOCK_N, False)
        b_max, b_sum, b_acc0, b_acc1 = _attend_pairs(
            b_q0, b_q1, b_max, b_sum, b_acc0, b_acc1, p_k, p_v, p_k_scale, p_v_scale, rows, m_n,
            scale, HALF, BLOCK_H, False,
        )  # fmt: skip
    if whole < end:
        m_n = whole + tl.arange(0, BLOCK_N) < end
        rows = cache_rows(p_table, whole, end, head, HEADS, S, BLOCK_N, True)
        b_max, b_sum, b_acc0, b_acc1 = _attend_pairs(
            b_q0, b_q1, b_max, b_sum, b_acc0, b_acc1, p_k, p_v, p_k_scale, p_v_scale, rows, m_n,
            scale, HALF, BLOCK_H, True,
        )  # fmt: skip

    factor = (1.0 / FP8_LIFT) / b_sum[:, None]
    b_out0, b_out1 = b_acc0 * factor, b_acc1 * factor
    if SPLITS == 1:
        tl.store(p_out + o_out, b_out0.to(p_out.dtype.element_ty), mask=m_o)
        tl.store(p_out + o_out + 1, b_out1.to(p_out.dtype.element_ty), mask=m_o)
    else:
        o_part = o_head * SPLITS + split
        p_part = p_partial + o_part[:, None] * DIM + o_h[None, :] * 2
        tl.store(p_part, b_out0, mask=m_o)
        tl.store(p_part + 1, b_out1, mask=m_o)
        tl.store(p_lse + o_part, b_max + tl.log2(b_sum), mask=o_g < GROUP)
