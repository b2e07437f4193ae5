"""Counter-based random numbers: Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011).

Owns the map (seed, sample index, position, token id) -> uniform number. Never keeps a generator
state and never touches torch's own: a number depends on its coordinates alone, so neither batch
mates, nor chunking, nor a replay after preemption can change what a request draws. Lesson 01 uses
it as a given; lesson 13 repeats it in Triton, equal bit for bit.
"""

from __future__ import annotations

import torch

MASK32 = 0xFFFFFFFF
# Round multipliers and key increments of the paper; the increments are the golden ratio and
# sqrt(3) - 1 in 32-bit fixed point.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Encrypt a 128-bit counter under a 64-bit key: four random 32-bit words.

    counter: four and key: two int64 tensors of broadcastable shapes, each word in 0..2**32-1.
    Returns four int64 tensors of the common shape, each word in 0..2**32-1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A 32 x 32 -> 64 bit product in int64 wraps modulo 2**64, which leaves every bit right,
        # but its top bit reads as a sign: `>> 32` then smears that sign into the upper half.
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        # The mask removes the smear. It also removes the upper halves of c1 and c3, which are
        # whole products from the round before: masking those apart would cost two more passes.
        c0 = ((product1 >> 32) ^ c1 ^ k0) & MASK32
        c2 = ((product0 >> 32) ^ c3 ^ k1) & MASK32
        c1, c3 = product1, product0
        k0 = (k0 + INCREMENTS[0]) & MASK32
        k1 = (k1 + INCREMENTS[1]) & MASK32
    return c0, c1 & MASK32, c2, c3 & MASK32


def uniform(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
) -> torch.Tensor:
    """One number in (0, 1) for each row and each token id of a range of the vocabulary.

    seed, sample_index, position: [B] int64 -> [B, vocab_size] float32; column j belongs to token
    id vocab_start + j, so that a shard of the vocabulary draws exactly its part of the whole row.
    Seeds are 64-bit patterns: a host seed counts modulo 2**64, a negative one as its two's
    complement. Sample index and position count modulo 2**32.
    """
    # One call yields four words, spent on four neighbouring token ids. A range need not begin or
    # end at a multiple of four, so whole groups are drawn and the overhang cut off.
    first, end = vocab_start // 4, (vocab_start + vocab_size + 3) // 4
    groups = torch.arange(first, end, device=seed.device)
    words = _words(seed[:, None], sample_index[:, None], position[:, None], groups[None])
    numbers = torch.stack([_to_unit(word) for word in words], dim=-1).flatten(1)  # [B, groups * 4]
    skip = vocab_start - 4 * first
    return numbers[:, skip : skip + vocab_size]


def uniform_at(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """The same numbers as `uniform`, at chosen token ids only. All arguments [N] int64 -> [N]."""
    words = _words(seed, sample_index, position, token_ids // 4)
    mine = torch.stack(words, dim=-1).gather(-1, (token_ids % 4)[:, None]).squeeze(-1)
    return _to_unit(mine)


def _words(
    seed: torch.Tensor, sample_index: torch.Tensor, position: torch.Tensor, groups: torch.Tensor
) -> Words:
    """Philox words of groups of four token ids; int64 tensors that broadcast together."""
    counter = (groups, position & MASK32, sample_index & MASK32, torch.zeros_like(position))
    return philox(counter, (seed & MASK32, (seed >> 32) & MASK32))


def _to_unit(word: torch.Tensor) -> torch.Tensor:
    """The middle of one of 2**23 equal cells of (0, 1), by the upper 23 bits of a word."""
    # 23 bits and a half fill float32's 24-bit significand: exact on every device, never 0 or 1,
    # so that the logarithm of a Gumbel number is always finite.
    return ((word >> 9).float() + 0.5) * 2.0**-23
