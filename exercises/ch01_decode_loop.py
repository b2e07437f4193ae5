"""Chapter 01: Decode loop and sampling (40 minutes, 7 points).

Make text out of a model: append the next token again and again, best one or drawn one.
Replace each `raise NotImplementedError`, then run:
    pytest exercises/test_ch01_decode_loop.py
Stuck? minivllm course hint ch01.1
To look around: minivllm course try ch01
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
    """Continue `ids` greedily: the best next token, again and again.

    model: model(ids [1, T] int64) gives logits [1, T, V]; row t scores every token of the
    vocabulary as the one that follows position t. The model remembers nothing between calls.
    ids: the prompt, at least one token; left as it was. max_new: 0 or more. eos_ids: token ids.
    Returns the new tokens, a list of int: at most max_new; after a token of eos_ids nothing
    follows, and that token is part of the result.

    The model is called once for each new token, each time with the whole text so far.

    Example:
        >>> calls = []
        >>> def counting_model(ids):  # after 3 comes 4, after 9 comes 0
        ...     assert ids.dim() == 2 and ids.shape[0] == 1, "ids must be [1, T]"
        ...     calls.append(ids.tolist())
        ...     if len(calls) == 50:
        ...         raise TimeoutError("called 50 times for 5 tokens: does the loop end?")
        ...     return torch.nn.functional.one_hot((ids + 1) % 10, 10).float()
        >>> generate_naive(counting_model, [3, 4], max_new=5, eos_ids=[7])
        [5, 6, 7]
        >>> calls
        [[[3, 4]], [[3, 4, 5]], [[3, 4, 5, 6]]]
    """
    # TODO(ch01.1): call the model on the whole text, append its best next token, stop in time
    raise NotImplementedError("ch01.1: generate_naive")


def token_probs(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The distribution from which each row's next token is drawn.

    logits: [B, V] float32, float16 or bfloat16. One number per row: temperature [B] float32,
    0 = greedy; top_k [B] int64, 0 = off, it may exceed V; top_p [B] float32, above 0, 1 = off.
    Returns [B, V] float32, each row of sum 1 and exactly 0 for the tokens that are cut.

    1. Subtract the row's largest logit, then divide by the temperature, in float32. (The other
       way round, large logits overflow or lose their digits.)
    2. Where top_k > 0: keep the top_k largest, and what equals the smallest of them.
    3. Where top_p < 1: take the softmax of what is kept (after temperature and top-k). If the
       best token alone reaches top_p, keep it only, of several best ones that of the lowest id.
       Else keep from the most likely token down until the sum reaches top_p. The token that
       reaches it stays, and so does what equals it.
    4. The softmax of what is left.

    For a temperature below 1e-5 and for top_k = 1 there is one token as well: the best one, of
    several best ones that of the lowest id, has probability 1. A loop over the rows is fine. The
    inputs are left as they were.

    Example:
        >>> logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()  # probabilities 0.4, 0.3, 0.2, 0.1
        >>> one, off_k, off_p = torch.tensor([1.0]), torch.tensor([0]), torch.tensor([1.0])
        >>> token_probs(logits, one / 2, off_k, off_p)  # their squares: 16, 9, 4, 1 of 30
        tensor([[0.5333, 0.3000, 0.1333, 0.0333]])
        >>> token_probs(logits, one, torch.tensor([3]), off_p)
        tensor([[0.4444, 0.3333, 0.2222, 0.0000]])
        >>> token_probs(logits, one, off_k, torch.tensor([0.5]))  # 0.4 is not enough, 0.7 is
        tensor([[0.5714, 0.4286, 0.0000, 0.0000]])
        >>> token_probs(logits, 0 * one, off_k, off_p)
        tensor([[1., 0., 0., 0.]])
        >>> two_best = torch.tensor([[2.0, 2.0, 1.0]])  # probabilities 0.42, 0.42, 0.16
        >>> token_probs(two_best, one, off_k, torch.tensor([0.4]))  # one alone reaches 0.4
        tensor([[1., 0., 0.]])
    """
    # TODO(ch01.2): scale by the temperature, cut by top-k, cut the rest by top-p, softmax
    raise NotImplementedError("ch01.2: token_probs")


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of the probabilities first exceeds u.

    probs: [B, V] float32, zeros among them, each row of sum 1 up to rounding; u: [B] float32 in
    [0, 1], one per row. Returns token ids [B] int64.
    With probabilities 0.2, 0.5, 0.3 a u in [0, 0.2) gives token 0, in [0.2, 0.7) token 1, and
    beyond that token 2: each token has as much room as it has probability.

    Where a row's sum is not 1, u means that part of the sum: u * sum. A token of probability 0 is
    never drawn, not even at u = 0 or u = 1. The inputs are left as they were.

    Not allowed: multinomial, torch.distributions.

    Example:
        >>> probs = torch.tensor([[0.0, 0.25, 0.5, 0.25, 0.0]])
        >>> draw(probs.expand(5, 5), torch.tensor([0.0, 0.2, 0.25, 0.74, 1.0]))
        tensor([1, 1, 2, 2, 3])
    """
    # TODO(ch01.3): running sum of the probabilities; the first token where it exceeds u
    raise NotImplementedError("ch01.3: draw")
