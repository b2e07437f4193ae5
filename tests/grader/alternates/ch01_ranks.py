"""Right in another style: recursion for the loop, masks from pairwise comparison, plain Python."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from itertools import accumulate

import torch


def generate_naive(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    if max_new == 0:
        return []
    row = model(torch.tensor(ids)[None])[0][len(ids) - 1].tolist()
    token = row.index(max(row))
    if token in eos_ids:
        return [token]
    return [token, *generate_naive(model, [*ids, token], max_new - 1, eos_ids)]


def token_probs(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    wide = logits.double()
    x = wide - wide.max(dim=-1, keepdim=True).values
    x = x / torch.where(temperature < 1e-5, 1.0, temperature).double()[:, None]
    larger = x[:, None, :] > x[:, :, None]  # [B, V, V]: is token j above token i?
    rank = larger.sum(dim=-1)  # equal tokens share a rank
    kept = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    share = x.exp() * kept
    share = share / share.sum(dim=-1, keepdim=True)
    # Equal tokens stay together: they are reached where the mass of all above them is not enough.
    above = (larger * share[:, None, :]).sum(dim=-1)
    kept &= (above < top_p.double()[:, None]) | (top_p == 1)[:, None]
    share = x.exp() * kept
    share = share / share.sum(dim=-1, keepdim=True)
    best = torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
    # The best token alone has all the mass it needs: its own, not that of its equals.
    own = (x.exp() * ((rank < top_k[:, None]) | (top_k == 0)[:, None])).sum(dim=-1)
    alone = (temperature < 1e-5) | (top_k == 1) | ((top_p < 1) & (1 / own >= top_p.double()))
    return torch.where(alone[:, None], best, share).float()


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    tokens = []
    for row, number in zip(probs.tolist(), u.tolist()):
        running = list(accumulate(row))
        token = bisect_right(running, number * running[-1])
        tokens.append(min(token, max(i for i, p in enumerate(row) if p > 0)))
    return torch.tensor(tokens)
