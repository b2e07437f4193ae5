"""What a benchmark asks of an engine: prompts of random token ids and output lengths.

Owns the recipe. It is fixed to the last token: seeded, all prompts first, each prompt's length
before its tokens, then all output lengths. The same numbers then come out in every engine that is
measured by this recipe. Never imports torch.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from minivllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all submitted at once.

    prompts: token ids. output_lens: tokens to generate for each, end tokens ignored.
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float = 0.6

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens that are asked for."""
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: what max_model_len must hold."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lens, strict=True))

    def params(self) -> list[SamplingParams]:
        """One set of sampling parameters a request."""
        return [
            SamplingParams(temperature=self.temperature, max_tokens=length, ignore_eos=True)
            for length in self.output_lens
        ]

    def describe(self) -> str:
        """The sizes in words."""
        return (
            f"{self.name}: {len(self.prompts):,} requests, {self.num_prompt_tokens:,} prompt and "
            f"{self.num_output_tokens:,} output tokens"
        )


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Sizes of a workload. Lengths are (least, most) tokens, both included, drawn evenly."""

    name: str
    num_requests: int
    prompt_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int = 0
    temperature: float = 0.6
    max_token_id: int = 10_000

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"num_requests must be at least 1, got {self.num_requests}")
        for name, (low, high) in (("prompt_len", self.prompt_len), ("output_len", self.output_len)):
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be 1 <= least <= most, got {low} and {high}")

    def changed(self, **sizes: Any) -> WorkloadSpec:
        """The same with other sizes; its name says so."""
        if not sizes:
            return self
        return dataclasses.replace(self, name=f"{self.name} (changed)", **sizes)

    def build(self, vocab_size: int) -> Workload:
        """Draw the requests; a small vocabulary limits the token ids."""
        rng = random.Random(self.seed)
        top = min(self.max_token_id, vocab_size - 1)
        prompts = [
            [rng.randint(0, top) for _ in range(rng.randint(*self.prompt_len))]
            for _ in range(self.num_requests)
        ]
        output_lens = [rng.randint(*self.output_len) for _ in range(self.num_requests)]
        return Workload(self.name, prompts, output_lens, self.temperature)


WORKLOADS = {
    spec.name: spec
    for spec in (
        # The run that engines of this kind publish numbers for; sized for one large GPU.
        WorkloadSpec("standard", 256, (100, 1024), (100, 1024)),
        # The same with a quarter of the output: for engines that would take it minutes.
        WorkloadSpec("short", 256, (100, 1024), (25, 256)),
        # Short enough for a lesson on two CPU cores, mixed enough to show batching.
        WorkloadSpec("mixed-32", 32, (16, 256), (16, 64)),
        # Short enough for a stage that computes everything again for every token.
        WorkloadSpec("ladder", 6, (16, 96), (16, 48), temperature=0.0),
        WorkloadSpec("compare-16", 16, (16, 256), (16, 128), temperature=0.0),
        WorkloadSpec("single", 1, (128, 128), (128, 128)),
    )
}
