"""Top-k, top-p and min-p of one row in Triton, by a search for the threshold.

Owns the kernel of `ops/filters.py`: a few passes over the row instead of a sort. Never draws. A
launch of its own: with the search inside, the sampler needed three times the registers and took
120 us instead of 104 for 256 random rows (H200). Lesson 13.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.kernels.runtime import INTERPRET, begin, overlaps
from minivllm.ops.sampling import SamplingBatch

BLOCK = 64 if INTERPRET else 8192  # logits of a row that its program holds at a time

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
def _cut_kernel(
    p_logits, p_reals, p_integers, p_best, p_cut, stride_row, size,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """cut[b]: tokens of row b with (x - best[b]) / T >= cut[b] survive its top-k, top-p and min-p

    Infinite where only the best token is left, -infinite where no filter is on.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride_row
    p_reals += row * 3
    temperature, top_p, min_p = tl.load(p_reals), tl.load(p_reals + 1), tl.load(p_reals + 2)
    top_k = tl.load(p_integers + row * 4)
    cut = tl.full((), float("-inf"), tl.float32)
    # Greedy rows and rows without a filter leave at once: the sampler finds their largest.
    best = tl.full((), -3.4028234663852886e38, tl.float32)
    if ((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperature >= 1e-5):
        inverse_t = 1.0 / temperature
        b_lanes = row_max(p_row, size, BLOCK)
        best = tl.clamp(tl.max(b_lanes, axis=0), best, -best)
        b_lanes = (b_lanes - best) * inverse_t
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
        cut = tl.where(alone, float("inf"), cut)
    tl.store(p_best + row, best)
    tl.store(p_cut + row, cut)


def launch_cut(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit and cut of each row that filters. logits: [B, V] -> [B], [B] float32."""
    rows, size = logits.shape
    # Not two halves of one tensor: kernels are compiled anew for another alignment.
    best, cut = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    pdl = overlaps(logits.device, rows)
    # All of a multiprocessor for a row: its passes are bound by what one program keeps under way.
    _cut_kernel[(rows,)](
        logits, batch.reals, batch.integers, best, cut, logits.stride(0), size,
        BLOCK, pdl, num_warps=16, launch_pdl=pdl,
    )  # fmt: skip
    return best, cut
