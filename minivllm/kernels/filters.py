"""Top-k, top-p and min-p of one row in Triton, by a search for the threshold.

Owns the kernel's side of `ops/filters.py`: a few passes over the row instead of a sort. Never
draws. Lesson 13.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Blocks of the row under way at a time: a pass is all waiting for memory.
STAGES = tl.constexpr(4)


@triton.jit
def row_max(p_row, size, BLOCK: tl.constexpr):
    """The largest logits of BLOCK lanes, each of which looks at every BLOCK-th: [BLOCK]."""
    b_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in tl.range(0, size, BLOCK, num_stages=STAGES):
        o = first + tl.arange(0, BLOCK)
        # [BLOCK]
        b_x = tl.load(p_row + o, mask=o < size, other=float("-inf")).to(tl.float32)
        b_max = tl.maximum(b_max, b_x)
    return b_max


@triton.jit
def _add_block(b_s, m, mid, floor, b_total, b_above, b_below, BY_MASS: tl.constexpr):
    """Count a block of scaled logits into the lanes' totals and neighbours of `mid`: see _weigh."""
    m_at_least = (b_s >= mid) & m
    b_weight = tl.exp(b_s) if BY_MASS else tl.full(b_s.shape, 1.0, tl.float32)
    b_total += tl.where(m_at_least & (b_s >= floor), b_weight, 0.0)
    b_above = tl.minimum(b_above, tl.where(m_at_least, b_s, float("inf")))
    b_below = tl.maximum(b_below, tl.where(m_at_least, float("-inf"), b_s))
    return b_total, b_above, b_below


@triton.jit
def _weigh(
    p_row, size, best, inverse_t, b_lanes, mid, floor,
    BY_MASS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight of the tokens at or above both `mid` and `floor`, and mid's neighbours.

    A token weighs exp(s) by mass, else 1, where s is its scaled logit. The neighbours are the least
    s >= mid and the largest s < mid, infinite where there is none. LANES: not over the row, but
    over the scaled lane maxima b_lanes.
    """
    b_total = tl.zeros((BLOCK,), tl.float32)
    b_above = tl.full((BLOCK,), float("inf"), tl.float32)
    b_below = tl.full((BLOCK,), float("-inf"), tl.float32)
    if LANES:
        m = b_lanes == b_lanes
        b_total, b_above, b_below = _add_block(
            b_lanes, m, mid, floor, b_total, b_above, b_below, BY_MASS
        )
    else:
        for first in tl.range(0, size, BLOCK, num_stages=STAGES):
            o = first + tl.arange(0, BLOCK)
            # [BLOCK]
            b_x = tl.load(p_row + o, mask=o < size, other=float("-inf")).to(tl.float32)
            b_total, b_above, b_below = _add_block(
                (b_x - best) * inverse_t, o < size, mid, floor, b_total, b_above, b_below, BY_MASS
            )
    return tl.sum(b_total, axis=0), tl.min(b_above, axis=0), tl.max(b_below, axis=0)


@triton.jit
def _search(
    p_row, size, best, inverse_t, b_lanes, floor, goal, hint,
    BY_MASS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest scaled logit at which the weight above reaches `goal`; `floor` where none does.

    Bisection between values that occur, so that it ends exactly, ties included. The first look is
    at `hint`, the second just above it: together they end the search where the hint was right.
    """
    low, high = floor, tl.full((), 0.0, tl.float32)
    mid, tries = hint, 0
    while low < high:
        total, above, below = _weigh(
            p_row, size, best, inverse_t, b_lanes, mid, floor, BY_MASS, LANES, BLOCK
        )
        reached = total >= goal
        low = tl.where(reached, above, low)
        # Exactly reached: without the token at `above` it would not be. Top-k mostly ends so.
        high = tl.where(reached, tl.where(total == goal, above, high), below)
        tries += 1
        # Doubling downwards while nothing is known to reach the goal, then halving.
        mid = tl.where(low == float("-inf"), 2 * high - 1, low + (high - low) * 0.5)
        mid = tl.where((tries == 1) & reached, low * (1.0 - 2.4e-7), mid)
        mid = tl.where(mid > low, mid, high)
    return high


@triton.jit
def _cut(
    p_row, size, best, inverse_t, b_lanes, floor, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """`_search` over the row, with the cut of the lane maxima as the hint.

    The few best tokens of a row mostly stand in different lanes, so that the cut of the maxima,
    which costs no pass, is the row's own cut or just below it.
    """
    start = tl.full((), -1.0, tl.float32)
    hint = _search(p_row, size, best, inverse_t, b_lanes, floor, goal, start, BY_MASS, True, BLOCK)
    hint = tl.where(hint > floor, hint, start)
    hint = tl.where(hint > floor, hint, 0.0)
    return _search(p_row, size, best, inverse_t, b_lanes, floor, goal, hint, BY_MASS, False, BLOCK)


@triton.jit
def row_cut(p_row, size, top_k, top_p, min_p, inverse_t, BLOCK: tl.constexpr):
    """(best logit, cut, alone): tokens with s >= cut survive; alone: only the best one does."""
    b_lanes = row_max(p_row, size, BLOCK)
    best = tl.clamp(tl.max(b_lanes, axis=0), -3.4028234663852886e38, 3.4028234663852886e38)
    b_lanes = (b_lanes - best) * inverse_t
    cut = tl.full((), float("-inf"), tl.float32)
    alone = top_k == 1
    if (top_k > 1) & (top_k < size):
        goal = top_k.to(tl.float32)  # exact: a vocabulary has fewer than 2^24 tokens
        cut = _cut(p_row, size, best, inverse_t, b_lanes, cut, goal, False, BLOCK)
    if (top_p < 1) & (top_k != 1):
        total, above, below = _weigh(
            p_row, size, best, inverse_t, b_lanes, cut, cut, True, False, BLOCK
        )
        goal = total * top_p
        # The best token's own mass is exp(0).
        alone = goal <= 1
        if goal > 1:
            cut = _cut(p_row, size, best, inverse_t, b_lanes, cut, goal, True, BLOCK)
    if min_p > 0:
        cut = tl.maximum(cut, tl.log(min_p))
    return best, cut, alone
