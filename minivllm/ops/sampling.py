"""From logits to the next token of each row.

Owns greedy choice, temperature, the top-k, top-p and min-p filters, and the draw; `token_probs`
and `draw` are the plain units of lesson 01, `sample` is what the engine runs. Never keeps random
state: all randomness is `ops.philox` of numbers that belong to the row, so a row's token does not
depend on its batch mates. The torch forms here are the specification of the GPU kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from minivllm.ops.filters import survivors
from minivllm.ops.philox import uniform, uniform_at
from minivllm.ops.pinned import to_device
from minivllm.sampling_params import GREEDY_TEMPERATURE

if TYPE_CHECKING:
    from minivllm.engine.step_plan import RowSampling


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling numbers of a batch, one row each.

    In two tensors, so that one copy or one look-up moves them all. The flags are known on the
    host, so that choosing the cheap path never waits for the device.
    """

    reals: torch.Tensor  # [B, 3] float32: temperature, top_p, min_p
    integers: torch.Tensor  # [B, 4] int64: top_k, seed, sample_index, position
    all_greedy: bool
    any_filter: bool

    @property
    def temperature(self) -> torch.Tensor:
        """[B]; 0 = greedy."""
        return self.reals[:, 0]

    @property
    def top_p(self) -> torch.Tensor:
        """[B]; 1 = off."""
        return self.reals[:, 1]

    @property
    def min_p(self) -> torch.Tensor:
        """[B]; 0 = off."""
        return self.reals[:, 2]

    @property
    def top_k(self) -> torch.Tensor:
        """[B]; 0 = off."""
        return self.integers[:, 0]

    @property
    def seed(self) -> torch.Tensor:
        """[B]; the bits of a seed modulo 2**64."""
        return self.integers[:, 1]

    @property
    def sample_index(self) -> torch.Tensor:
        """[B]; which of a request's n samples."""
        return self.integers[:, 2]

    @property
    def position(self) -> torch.Tensor:
        """[B]; of the token to draw."""
        return self.integers[:, 3]

    @classmethod
    def from_rows(
        cls, rows: Sequence[RowSampling], device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """Pack the rows of a step plan; values are taken as already validated."""
        random = [row for row in rows if row.temperature >= GREEDY_TEMPERATURE]
        reals = [(_temperature(row), row.top_p, row.min_p) for row in rows]
        integers = [
            # No vocabulary has 2**31 tokens: beyond, all values of top_k mean the same.
            (min(max(row.top_k, 0), 2**31), _as_int64(row.seed), row.sample_index, row.position)
            for row in rows
        ]
        return cls(
            to_device(torch.tensor(reals, dtype=torch.float32).view(-1, 3), device),
            to_device(torch.tensor(integers, dtype=torch.int64).view(-1, 4), device),
            all_greedy=not random,
            any_filter=any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in random),
        )

    def update(self, rows: torch.Tensor, new: SamplingBatch) -> None:
        """Write `new` over some rows, by index [R]; the flags are not kept here."""
        self.reals[rows] = new.reals
        self.integers[rows] = new.integers

    def select(self, rows: torch.Tensor) -> SamplingBatch:
        """A copy of some rows, by index [R]; the flags stay those of the whole."""
        return replace(self, reals=self.reals[rows], integers=self.integers[rows])


def _temperature(row: RowSampling) -> float:
    """The row's temperature as a float32 can hold it; 0 where greedy."""
    # Compared in float64, here alone: as a float32, 9.9999999e-6 would round up to the limit.
    if row.temperature < GREEDY_TEMPERATURE:
        return 0.0
    # The largest finite ones already make every finite row flat; infinity would turn -inf to nan.
    return min(row.temperature, torch.finfo(torch.float32).max)


def _as_int64(seed: int) -> int:
    """The signed 64-bit number that has the bits of `seed` modulo 2**64."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def sample(logits: torch.Tensor, batch: SamplingBatch, vocab_start: int = 0) -> torch.Tensor:
    """Choose one token a row: the best one where greedy, else at random (Gumbel-max).

    logits: [B, V] of any float type, unchanged; column j is token id vocab_start + j. Returns
    token ids [B] int64. A tie of greedy rows goes to the lowest id. A shard of the vocabulary
    gives its own winner; ValueError with filters, whose cut depends on the whole vocabulary.
    """
    if batch.any_filter and vocab_start:
        raise ValueError(f"vocab_start={vocab_start}: top_k, top_p, min_p need the whole row")
    if batch.all_greedy:
        return logits.argmax(dim=-1) + vocab_start
    random = (batch.temperature >= GREEDY_TEMPERATURE).nonzero().squeeze(-1)
    if len(random) == len(logits):
        return scores(logits, batch, vocab_start).argmax(dim=-1) + vocab_start
    # Greedy rows read the raw logits: scaling could round two different ones into a tie.
    token_ids = logits.argmax(dim=-1)
    token_ids[random] = scores(logits[random], batch.select(random), vocab_start).argmax(dim=-1)
    return token_ids + vocab_start


def scores(logits: torch.Tensor, batch: SamplingBatch, vocab_start: int = 0) -> torch.Tensor:
    """Scaled logits plus Gumbel noise, -inf where a filter cuts: the largest wins.

    logits: [B, V], rows all of temperature >= GREEDY_TEMPERATURE -> [B, V] float32, relative to the
    row's largest logit. The gap between a row's two largest scores is its decision margin.
    """
    scaled = scale(logits, batch.temperature)
    if not batch.any_filter:
        return scaled.add_(_row_noise(batch, vocab_start, logits.shape[-1]))
    kept = survivors(scaled, batch.top_k, batch.top_p, batch.min_p)
    scaled.masked_fill_(~kept, -math.inf)
    # Noise at one id costs as much as at four neighbours, so noise by id pays off well below a
    # quarter: for 16 rows with 50 of 49152 left it takes 0.4 ms, for 16 whole rows 12 ms or more.
    few = kept.sum(dim=-1) * 8 < logits.shape[-1]
    row, column = (kept & few[:, None]).nonzero(as_tuple=True)
    noise = uniform_at(batch.seed[row], batch.sample_index[row], batch.position[row], column)
    scaled[row, column] += _gumbel(noise)
    many = (~few).nonzero().squeeze(-1)
    if len(many):
        scaled.index_add_(0, many, _row_noise(batch.select(many), 0, logits.shape[-1]))
    return scaled


def _row_noise(batch: SamplingBatch, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """Gumbel noise for all ids of a range: [B, vocab_size]."""
    return _gumbel(uniform(batch.seed, batch.sample_index, batch.position, vocab_start, vocab_size))


def scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - row maximum) / temperature. [B, V], [B] -> [B, V] float32, the largest being 0."""
    logits = logits.float()
    # Subtract first: 1e4 / 1e-4 leaves float32 no digits to tell neighbours apart. The clamp
    # keeps a row of -inf from becoming -inf - -inf = nan.
    limits = torch.finfo(torch.float32)
    best = logits.amax(dim=-1, keepdim=True).clamp(limits.min, limits.max)
    return (logits - best) / temperature[:, None]


def _gumbel(u: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers of uniform ones; argmax(x + g) is a draw from softmax(x)."""
    return -(-u.log()).log()


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
