"""What a request returns, and what a step leaves on record: vLLM's shapes.

Owns plain result types. Never computes, never imports torch. Lessons 00 and 10.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token; rank 1 is the most likely of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    finish_reason: "stop", "length", "abort", or None while it runs. stop_reason: the stop string or
    token id that ended it; "kv_capacity" where the whole cache was too small for one more token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """True once the sample has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds, on one monotonic clock. None until the event has happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission to the first token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: whole after `generate`, growing in `step`, new text in `stream`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step, for plots: `llm.stats.steps`."""

    phase: str  # "prefill", "decode" or "mixed"
    num_rows: int
    num_decode: int
    num_tokens: int
    seconds: float
    blocks_in_use: int
    num_waiting: int
    num_running: int
    preemptions: int  # sequences preempted while this step was planned
    cached_tokens: int  # prompt tokens that this step's admissions found in the prefix cache


@dataclass(slots=True)
class EngineStats:
    """Counters over the life of an engine and the record of its steps."""

    steps: list[StepRecord] = field(default_factory=list)
    num_blocks: int = 0
    block_size: int = 0
    kv_bytes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def peak_blocks_in_use(self) -> int:
        """Most KV blocks that any step held."""
        return max((step.blocks_in_use for step in self.steps), default=0)

    @property
    def peak_kv_usage(self) -> float:
        """Share of the KV pool in use at its peak, 0..1."""
        return self.peak_blocks_in_use / self.num_blocks if self.num_blocks else 0.0

    @property
    def tokens_computed(self) -> int:
        """Tokens that went through the model, prompts and recomputation included."""
        return sum(step.num_tokens for step in self.steps)

    def clear(self) -> None:
        """Forget the steps and counters, keep the sizes: for a measurement after a warm-up."""
        self.steps.clear()
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = self.preemptions = 0
