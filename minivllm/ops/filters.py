"""The filters of sampling: top-k, then top-p among the rest, then min-p.

Owns which tokens of a row may be drawn. Each filter is a threshold on the scaled logits, so that a
kernel needs no sorted row and tokens that tie at the cut all stay. Never draws. Lesson 01 has the
same filters on a sorted row, in `ops.sampling.token_probs`.
"""

from __future__ import annotations

import math

import torch

# Top-p looks at this many of the largest logits first; eight times more where they do not suffice.
FIRST_TOP_P_WIDTH = 256


def survivors(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Which tokens of each row survive its filters; at least the best one does.

    scaled: [B, V] float32 with row maximum 0; top_k [B] (0 = off), top_p [B] (1 = off), min_p [B]
    (0 = off) -> [B, V] bool. Ties at a cut stay, with one exception: where a filter leaves room
    for one token (top_k = 1, or the best one alone reaches top_p), that is the lowest best id.
    """
    cut = torch.full_like(min_p, -math.inf)
    # The exception makes top_k = 1 and top_p -> 0 equal to greedy decoding, as users expect. Ties
    # for the best place are common in bfloat16: a few positions in a hundred.
    alone = top_k == 1
    rows = ((top_k > 1) & (top_k < scaled.shape[-1])).nonzero().squeeze(-1)
    if len(rows):
        cut[rows] = _top_k_cut(scaled[rows], top_k[rows])
    rows = ((top_p < 1) & ~alone).nonzero().squeeze(-1)
    if len(rows):
        cut[rows], alone[rows] = _top_p_cut(scaled[rows], top_p[rows], cut[rows])
    # min-p is p / p_max >= min_p, here in logarithms; log(0) = -inf cuts nothing. It has no say
    # in the mass that top-p counts, because it comes after.
    kept = scaled >= cut.maximum(min_p.log())[:, None]
    rows = alone.nonzero().squeeze(-1)
    if len(rows):
        kept[rows] = False
        kept[rows, scaled[rows].argmax(dim=-1)] = True
    return kept


def _top_k_cut(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The k-th largest value of each row. [R, V], [R] in 1..V -> [R]."""
    # topk at the largest k of the batch: 1.2 ms for 16 rows of 49152, where a sort takes 56 ms.
    best = scaled.topk(int(top_k.max()), dim=-1).values
    return best.gather(-1, top_k[:, None].long() - 1).squeeze(-1)


def _top_p_cut(
    scaled: torch.Tensor, top_p: torch.Tensor, floor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value at which the mass of the larger ones reaches top_p of all at or above `floor`.

    [R, V], [R], [R] -> cut [R], and [R] bool: whether the best token reaches it alone. The token
    that crosses top_p is inside.
    """
    # float64: a float32 sum depends on the order of addition, and that on the batch's shape.
    mass = scaled.exp().masked_fill_(scaled < floor[:, None], 0)
    goal = top_p * mass.sum(dim=-1, dtype=torch.float64)
    # The best token's own mass is exp(0).
    alone = goal <= 1
    cut = floor.clone()
    # Models are mostly sure: the crossing is nearly always among the first few hundred tokens.
    # Only a row where it is not pays for more, up to a full sort.
    width, left = FIRST_TOP_P_WIDTH, (~alone).nonzero().squeeze(-1)
    while len(left):
        width = min(width, scaled.shape[-1])
        best = scaled[left].topk(width, dim=-1).values
        reached = best.exp().cumsum(dim=-1, dtype=torch.float64) >= goal[left, None]
        # At full width the last token counts as reached: the two sums may differ in a last bit.
        reached[:, -1] |= width == scaled.shape[-1]
        found = reached.any(dim=-1)
        crossing = best.gather(-1, reached.int().argmax(dim=-1, keepdim=True)).squeeze(-1)
        cut[left[found]] = crossing[found]
        left, width = left[~found], width * 8
    return cut, alone
