"""Right in another style: topk in place of a sort, searchsorted, row by row for the filters."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


def generate_naive(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    text = torch.tensor([ids])
    new: list[int] = []
    ends = frozenset(eos_ids)
    while len(new) < max_new and not (new and new[-1] in ends):
        token = torch.max(model(text)[:, -1:], dim=-1).indices  # [1, 1]
        text = torch.cat([text, token], dim=1)
        new.append(token.item())
    return new


def token_probs(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    return torch.stack([one_row(*row) for row in zip(logits, temperature, top_k, top_p)])


def one_row(
    row: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    greedy = torch.zeros(row.shape, dtype=torch.float32)
    greedy[row.argmax()] = 1.0
    if temperature < 1e-5 or top_k == 1:
        return greedy
    row = row.float()
    weights = ((row - row.max()) / temperature).exp()  # not normalised: the largest is 1
    if 0 < top_k < len(row):
        weights = weights * (weights >= weights.topk(int(top_k)).values[-1])
    if top_p < 1:
        ranked = weights.sort(descending=True).values.double()
        running = ranked.cumsum(0) / ranked.sum()
        place = int(torch.searchsorted(running, top_p.double()))
        if place == 0:
            return greedy
        weights = weights * (weights >= ranked[place].float())
    return weights / weights.sum()


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = probs.double().cumsum(dim=1)
    goal = u.double() * running[:, -1]
    token = torch.searchsorted(running, goal[:, None], right=True)[:, 0]
    last = torch.stack([row.nonzero()[-1, 0] for row in probs])
    return token.minimum(last)
