"""Solution of chapter 01, Decode loop and sampling. The reasons stand in ch01_decode_loop.md.

Generated from minivllm/stages/s1_naive.py, minivllm/ops/sampling.py by `python -m minivllm.course
build`:
edit there, not here.
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


def token_probs(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The distribution from which each row's next token is drawn.

    logits: [B, V]; temperature: [B], 0 = greedy; top_k: [B], 0 = off; top_p: [B], 1 = off.
    Returns [B, V] float32, rows of sum 1, exactly 0 for what is cut. Top-k comes first, then top-p
    among the rest; ties at the cut stay. Where only one token is wanted (temperature 0, top_k 1,
    or the best one alone reaches top_p), it is the best, the lowest id on a tie.
    """
    vocab = logits.shape[-1]
    best = logits.argmax(dim=-1, keepdim=True)
    # The largest scaled logit is 0 and all others are below: no temperature can overflow.
    x = logits.float() - logits.gather(-1, best).float()
    x = x / temperature.clamp(min=1e-5)[:, None]

    ranked = x.sort(dim=-1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
    kth = ranked.gather(-1, k[:, None] - 1)
    ranked = ranked.masked_fill(ranked < kth, float("-inf"))

    # Count the tokens that stay below top_p; the next one crosses it and is still inside.
    mass = ranked.double().softmax(dim=-1).cumsum(dim=-1)
    below = (mass < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(max=vocab - 1)
    pth = torch.where(top_p[:, None] < 1, ranked.gather(-1, below), kth)

    probs = x.masked_fill(x < torch.maximum(kth, pth), float("-inf")).softmax(dim=-1)
    alone = (temperature < 1e-5) | (top_k == 1) | ((top_p < 1) & (below[:, 0] == 0))
    return torch.where(alone[:, None], torch.zeros_like(probs).scatter(-1, best, 1.0), probs)


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of the probabilities first exceeds u.

    probs: [B, V], rows of positive sum (1 up to rounding); u: [B] in [0, 1] -> [B] int64.
    Never a token of probability 0, not even at u = 0 or 1.
    """
    running = probs.double().cumsum(dim=-1)
    total = running[:, -1:]
    # u is scaled by the real sum, or a row that adds up to 0.9999 could run off its end.
    token = (running <= u[:, None] * total).sum(dim=-1)
    # Where u * total rounds up to total, the answer is the last token that added anything.
    last = (running < total).sum(dim=-1)
    return torch.minimum(token, last)
