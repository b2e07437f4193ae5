"""What a measurement says: one plain, frozen result with its environment.

Owns names and units: seconds, bytes, tokens. Never measures. Results are comparable only between
runs of one machine and one workload, which is why both travel with the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds over all samples: mean, median, 99th percentile. Zeros where there was no sample."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Latency:
        """Summarise."""
        if not seconds:
            return Latency(0.0, 0.0, 0.0)
        return Latency(
            mean=float(np.mean(seconds)),
            p50=float(np.percentile(seconds, 50)),
            p99=float(np.percentile(seconds, 99)),
        )


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run of one workload.

    seconds: from the first submission to the last token. ttft: time to first token of each request.
    inter_token: gaps between the tokens of one request, over all requests. prefill_seconds: steps
    that had any prompt token in them; decode_seconds: the others. peak_kv_bytes of kv_bytes: used
    and reserved. tokens_computed: went through the model, so recomputed ones count and cached ones
    do not.
    """

    workload: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    ttft: Latency
    inter_token: Latency
    num_steps: int
    prefill_seconds: float
    prefill_tokens: int
    decode_seconds: float
    decode_tokens: int
    tokens_computed: int
    cached_tokens: int
    preemptions: int
    block_size: int
    num_blocks: int
    peak_blocks: int
    kv_bytes: int
    peak_kv_bytes: int
    settings: dict[str, Any]
    environment: dict[str, Any]

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second over the whole run, prefill included: the headline."""
        return self.output_tokens / self.seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second, over the steps that computed any; 0 without one."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second over the steps that only decode; 0 where every step had a prompt."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def peak_kv_usage(self) -> float:
        """Share of the KV pool in use at its peak, 0..1."""
        return self.peak_blocks / self.num_blocks if self.num_blocks else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the rates first."""
        rates = ("output_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")
        return {
            **{name: getattr(self, name) for name in rates},
            "peak_kv_usage": self.peak_kv_usage,
            **dataclasses.asdict(self),
        }
