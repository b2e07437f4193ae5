"""What one step computes: the message from the scheduler to the runner.

Owns the plain types on both sides of a launch. Carries all that the step needs and nothing else, so
that it can be pickled to a worker as it is (case K24). Never imports torch. Lesson 10.
"""

from __future__ import annotations

from dataclasses import dataclass


# Not frozen, and never changed all the same: 256 rows of two frozen records each cost the host
# 0.4 ms a step more to make.
@dataclass(slots=True)
class RowSampling:
    """How a row's next token is drawn. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off.

    The random numbers are a function of (seed, sample_index, position, token id) alone: they do not
    depend on the batch, and a recomputed token draws the same ones.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample_index: int
    position: int  # index in the sequence of the token to be drawn
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The row's prompt positions whose log-probabilities are asked for.

    targets[i] is the token that follows position start + i.
    """

    count: int
    targets: list[int]


@dataclass(slots=True)
class ScheduledRow:
    """One sequence's share of a step: positions start..end-1.

    `token_ids` holds their tokens. It is one short where the last of them is still being sampled by
    the step before this one: the runner then has it on the device.
    """

    seq_id: int
    epoch: int  # changes when the sequence is preempted: its blocks are then all new
    start: int
    end: int
    token_ids: list[int]
    block_table: list[int]
    sampling: RowSampling | None  # None: a chunk that does not reach the end yields no token
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that this row computes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of a step, decode rows first."""

    rows: list[ScheduledRow]
    num_decode: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token itself, and of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has found, row by row as in its plan."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]
