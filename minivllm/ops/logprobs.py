"""Log-probabilities of tokens, for the requests that ask for them.

Owns the ranking of tokens and their log-softmax. They are those of the raw logits, before
temperature and filters, so that one text has one log-probability however it was sampled. Never
picks a token. Lesson 01 shows what the numbers mean.
"""

from __future__ import annotations

import torch


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k best tokens of each row, and where the row's own token stands among all.

    logits: [B, V] of any float type, token_ids: [B] int64, 0 <= k <= V. Returns
    values [B, k] float32, best first; ids [B, k] int64; chosen [B] float32, the log-probability of
    token_ids; rank [B] int64, 1 = best. Equal logits rank by token id, lowest first, as in greedy
    decoding: rank r <= k always stands in column r - 1. ValueError where k is out of range.
    """
    vocab_size = logits.shape[-1]
    if not 0 <= k <= vocab_size:
        raise ValueError(f"logprobs={k} must lie in 0..{vocab_size}, the size of the vocabulary")
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    token_ids = token_ids[:, None]
    ids = _best(logits, k)
    # Ranks compare the logits: log-softmax rounds, and could make two tokens equal that are not.
    own = logits.gather(-1, token_ids)
    ahead_of_own = torch.arange(vocab_size, device=logits.device) < token_ids
    rank = 1 + ((logits > own) | ((logits == own) & ahead_of_own)).sum(dim=-1)
    return logprobs.gather(-1, ids), ids, logprobs.gather(-1, token_ids).squeeze(-1), rank


def _best(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest logits of each row, lowest id first among equals: [B, k] int64."""
    vocab_size = logits.shape[-1]
    # topk picks any of the tokens that tie. So the id becomes part of what is compared, below the
    # logit: a float's bits are ordered like integers, the negative ones backwards. (A stable sort
    # of whole rows costs more, and picking the tied tokens out would wait for the device.)
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    behind = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered << 32) + behind
    return vocab_size - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
