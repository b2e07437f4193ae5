"""Stage 1: the decode loop at its plainest, everything computed again for every token.

Owns the loop, and the model that turns it into one that samples. Never keeps anything between
tokens, and that is its lesson: the work for one token grows with the length of the text. Lesson 01.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


def generate_naive(
    model: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    """The greedy continuation of `ids`: at most `max_new` new tokens, the ending one included.

    model: ids [1, T] int64 -> logits [1, T, V]. `ids` is left as it was.
    """
    tokens = list(ids)
    while len(tokens) - len(ids) < max_new:
        logits = model(torch.tensor([tokens]))
        # Row t scores the token after position t: only the last row is about the future.
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in eos_ids:
            break
    return tokens[len(ids) :]


class SampledModel:
    """A model that has already chosen: its logits are 1 at the token it drew, else 0.

    A loop that takes the best token then samples, and needs no second form. model: ids [1, T], and
    whatever else the loop passes, -> logits [1, T, V]; token_probs and draw: lesson 01.
    """

    def __init__(
        self,
        model: Callable[..., torch.Tensor],
        token_probs: Callable[..., torch.Tensor],
        draw: Callable[..., torch.Tensor],
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.token_probs = token_probs
        self.draw = draw
        # One row: a stage runs one sequence at a time.
        self.numbers = (
            torch.tensor([temperature]),
            torch.tensor([top_k]),
            torch.tensor([top_p]),
        )
        # Of its own: what else draws random numbers in the process changes no text.
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, ids: torch.Tensor, *rest: object) -> torch.Tensor:
        """ids: [1, T] -> [1, T, V]; rows before the last are 0."""
        logits = self.model(ids, *rest).cpu()
        u = torch.rand(1, generator=self.generator)
        token = self.draw(self.token_probs(logits[:, -1], *self.numbers), u)  # [1]
        chosen = torch.zeros_like(logits)
        chosen[0, -1, token] = 1.0
        return chosen
