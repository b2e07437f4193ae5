"""What the decode attention kernels share: how a context is cut, and how the parts are combined.

Owns the sizes of splits and the combining kernel. Lesson 13.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minivllm.kernels.runtime import begin


@triton.jit
def split_size(length, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens of one split: whole tiles, evenly many. Short contexts need fewer splits."""
    return tl.cdiv(tl.cdiv(length, BLOCK_N), SPLITS) * BLOCK_N


@triton.jit
def combine_kernel(
    p_partial,
    p_lse,
    p_lens,
    p_out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """w[s] = 2^(lse[s] - max lse);  out = sum_s w[s] partial[s] / sum_s w[s]"""
    begin(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(p_lens + row)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    # Splits that had tokens; the others wrote nothing. A pad row has none, and sums up to 0.
    live = tl.cdiv(length, tl.maximum(split_size(length, SPLITS, BLOCK_N), 1))
    m_s, m_d = o_s < live, o_d < DIM
    o_part = (row * HEADS + head) * SPLITS + o_s
    # [S], [S, D]
    b_lse = tl.load(p_lse + o_part, mask=m_s, other=float("-inf"))
    m_part = m_s[:, None] & m_d[None, :]
    b_part = tl.load(p_partial + o_part[:, None] * DIM + o_d[None, :], mask=m_part, other=0.0)
    b_w = tl.where(m_s, tl.exp2(b_lse - tl.max(b_lse, axis=0)), 0.0)
    total = tl.sum(b_w, axis=0)
    b_out = tl.sum(b_part * b_w[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    p_row = p_out + (row * HEADS + head) * DIM
    tl.store(p_row + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)
