"""Stage 1: the decode loop at its plainest, everything computed again for every token.

Owns the loop. Never keeps anything between tokens, and that is its lesson: the work for one token
grows with the length of the text. Lesson 01.
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
