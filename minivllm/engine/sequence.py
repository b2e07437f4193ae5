"""One sample of one request: its tokens, its progress, its status.

Owns the token history and the counters that say how far it is computed. Never decides anything: the
scheduler moves it, the block manager fills its block table. Lesson 10.
"""

from __future__ import annotations

from enum import Enum

from minivllm.engine.step_plan import PromptLogprobs, RowSampling
from minivllm.sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence is. A preempted one waits again once its last launched step is read."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """A prompt and what has been generated after it.

    | counter | meaning |
    |---|---|
    | len(token_ids) | tokens known on the host |
    | num_pending | tokens being sampled by launched steps, not read yet |
    | num_tokens | both together: what planning counts with |
    | num_computed | tokens whose K and V are stored, by launched steps included |
    | steps_in_flight | launched steps with this sequence in them, not read yet |

    num_computed < num_tokens while there is work; the difference is 1 in decode.
    """

    def __init__(
        self,
        seq_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        sample_index: int = 0,
        seed: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        leader: Sequence | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.params = params
        self.sample_index = sample_index
        self.seed = seed
        # The first sample of the request: the others wait until its prompt is computed, and share.
        self.leader = leader
        self.prompt_len = len(prompt_ids)
        self.token_ids = list(prompt_ids)
        self.eos_ids = frozenset() if params.ignore_eos else eos_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        self.status = Status.WAITING
        self.num_pending = 0
        self.num_computed = 0
        self.steps_in_flight = 0
        self.block_table: list[int] = []
        self.epoch = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache, first admission
        # Most tokens it may reach, and what to report when that is what ends it.
        self.max_total = self.prompt_len
        self.limit_reason: str | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that still have to go through the model."""
        return self.num_tokens - self.num_computed

    @property
    def in_decode(self) -> bool:
        """True where the only work left is the newest generated token."""
        computed = self.num_computed
        # Asked several times a row and step: spelt out, without the properties above.
        return computed >= self.prompt_len and (
            len(self.token_ids) + self.num_pending - computed == 1
        )

    @property
    def at_limit(self) -> bool:
        """True where no further token may be planned; the last ones may still be in flight."""
        return self.num_tokens >= self.max_total

    @property
    def finished(self) -> bool:
        """True once it has a finish reason."""
        return self.status is Status.FINISHED

    @property
    def completion_ids(self) -> list[int]:
        """Generated tokens."""
        return self.token_ids[self.prompt_len :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True for the one sample that reports its prompt's log-probabilities."""
        return self.params.prompt_logprobs is not None and self.sample_index == 0

    def row_sampling(self, position: int) -> RowSampling:
        """What the runner needs to draw the token at `position`."""
        params = self.params
        return RowSampling(
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.seed,
            sample_index=self.sample_index,
            position=position,
            logprobs=params.logprobs,
        )

    def row_prompt_logprobs(self, start: int, end: int) -> PromptLogprobs | None:
        """The prompt tokens that follow positions start..end-1, where they are asked for."""
        count = self.params.prompt_logprobs
        if count is None or not self.wants_prompt_logprobs:
            return None
        targets = self.token_ids[start + 1 : min(end + 1, self.prompt_len)]
        return PromptLogprobs(count, targets) if targets else None
