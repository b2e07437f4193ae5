"""Top-k, top-p and min-p of one row in Triton, by a search for the threshold.

Owns the kernel's side of `ops/filters.py`: a few passes over the row instead of a sort. Never
draws. Lesson 13.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_max(p_row, size, BLOCK: tl.constexpr):
    """Largest logit of a row, within float32's finite numbers."""
    b_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        o = first + tl.arange(0, BLOCK)
        # [BLOCK]
        b_x = tl.load(p_row + o, mask=o < size, other=float("-inf")).to(tl.float32)
        b_max = tl.maximum(b_max, b_x)
    return tl.clamp(tl.max(b_max, axis=0), -3.4028234663852886e38, 3.4028234663852886e38)


@triton.jit
def _weigh(p_row, size, best, inverse_t, floor, mid, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """One pass: the weight of the tokens at or above both `floor` and `mid`, and mid's neighbours.

    A token weighs exp(s) by mass, else 1, where s is its scaled logit. The neighbours are the least
    s >= mid and the largest s < mid, infinite where there is none.
    """
    b_total = tl.zeros((BLOCK,), tl.float32)
    b_above = tl.full((BLOCK,), float("inf"), tl.float32)
    b_below = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        o = first + tl.arange(0, BLOCK)
        # [BLOCK]
        b_x = tl.load(p_row + o, mask=o < size, other=float("-inf")).to(tl.float32)
        b_s = (b_x - best) * inverse_t
        b_at_least = b_s >= mid
        m_in = b_at_least & (b_s >= floor) & (o < size)
        if BY_MASS:
            b_total += tl.where(m_in, tl.exp(b_s), 0.0)
        else:
            b_total += tl.where(m_in, 1.0, 0.0)
        b_above = tl.minimum(b_above, tl.where(b_at_least & (o < size), b_s, float("inf")))
        b_below = tl.maximum(b_below, tl.where(b_at_least, float("-inf"), b_s))
    return tl.sum(b_total, axis=0), tl.min(b_above, axis=0), tl.max(b_below, axis=0)


@triton.jit
def _search(p_row, size, best, inverse_t, floor, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest scaled logit of the row at which the weight above reaches `goal`.

    Bisection between values that occur in the row, so that it ends exactly, ties included: by
    doubling downwards from the best token until the goal is passed, then by halving.
    """
    low, high = floor, tl.full((), 0.0, tl.float32)
    while low < high:
        mid = tl.where(low == float("-inf"), 2 * high - 1, low + (high - low) * 0.5)
        mid = tl.where(mid > low, mid, high)
        total, above, below = _weigh(
            p_row, size, best, inverse_t, floor, mid, BY_MASS, BLOCK
        )
        reached = total >= goal
        low = tl.where(reached, above, low)
        # Exactly reached: without the token at `above` it would not be. Top-k mostly ends so.
        high = tl.where(reached, tl.where(total == goal, above, high), below)
    return high


@triton.jit
def row_cut(p_row, size, best, inverse_t, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """(cut, alone): tokens of scaled logit >= cut survive; alone: only the best one does."""
    cut = tl.full((), float("-inf"), tl.float32)
    alone = top_k == 1
    if (top_k > 1) & (top_k < size):
        goal = top_k.to(tl.float32)  # exact: a vocabulary has fewer than 2^24 tokens
        cut = _search(p_row, size, best, inverse_t, cut, goal, False, BLOCK)
    if (top_p < 1) & (top_k != 1):
        total, above, below = _weigh(p_row, size, best, inverse_t, cut, cut, True, BLOCK)
        goal = total * top_p
        # The best token's own mass is exp(0).
        alone = goal <= 1
        if goal > 1:
            cut = _search(p_row, size, best, inverse_t, cut, goal, True, BLOCK)
    if min_p > 0:
        cut = tl.maximum(cut, tl.log(min_p))
    return cut, alone
