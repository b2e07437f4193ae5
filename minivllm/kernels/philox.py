"""Philox-4x32-10 in Triton: the integers of `ops/philox.py`, bit for bit.

Owns the device functions that give a row's Gumbel noise at four neighbouring token ids. Never keeps
state. Lesson 13.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds on four uint32 words of a counter, under a key of two."""
    MULTIPLIER_0: tl.constexpr = 0xD2511F53
    MULTIPLIER_1: tl.constexpr = 0xCD9E8D57
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full((), MULTIPLIER_0, tl.uint32))
        high1 = tl.umulhi(c2, tl.full((), MULTIPLIER_1, tl.uint32))
        low0 = c0 * tl.full((), MULTIPLIER_0, tl.uint32)
        low1 = c2 * tl.full((), MULTIPLIER_1, tl.uint32)
        c0, c2 = high1 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low1, low0
        k0 += tl.full((), 0x9E3779B9, tl.uint32)
        k1 += tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words(seed, sample_index, position, o_group):
    """Random words of token ids 4 g .. 4 g + 3 for g in o_group: [G, 4] uint32.

    seed, sample_index, position: int64 scalars of the row; o_group: [G].
    """
    zero = tl.zeros_like(o_group).to(tl.uint32)
    c0, c1, c2, c3 = philox(
        o_group.to(tl.uint32),
        zero + position.to(tl.uint32),
        zero + sample_index.to(tl.uint32),
        zero,
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    # Joined so that word w of a group stands at column w, in the lane that computed it.
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (o_group.shape[0], 4))


@triton.jit
def may_reach(b_words, b_gap):
    """Whether noise from these words can be `b_gap` or more; now and then true where it can not.

    g >= gap means u >= exp(-exp(-gap)): two fast exponentials instead of two exact logarithms. The
    word's upper 23 bits become u by putting the exponent of 1 above them.
    """
    b_u = ((b_words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0  # up to 2^-24 too small
    b_least = tl.exp2(tl.exp2(b_gap * -LOG2_E) * -LOG2_E)
    return b_u >= b_least - 1e-6  # the fast exponentials are good to 2e-7 here


@triton.jit
def gumbel(b_words):
    """-log(-log(u)) of the uniform numbers that `ops.philox` makes of these words."""
    b_u = ((b_words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    # The exact logarithm: the fast one is off by 2^-22 near 1, where the largest noise is made.
    return -tl.log(-tl.log(b_u))
