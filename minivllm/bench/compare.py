"""The same requests through this engine and through `transformers.generate`, as a ratio.

Owns a fair comparison: one process, the same threads, float32, greedy, loading excluded, and in
each repeat one after the other, so that a noisy machine disturbs both. transformers gets padded
batches, as its own `generate` wants them: a batch runs until its longest output is complete, and
only the tokens that a request asked for count. LOG.md keeps the outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.bench.environment import stamp
from minivllm.bench.workload import Workload
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Comparison:
    """Useful tokens a second of both, one entry a repeat, for the batch and for one request."""

    workload: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    threads: int
    ours: list[float]
    theirs: list[float]
    ours_single: list[float]
    theirs_single: list[float]
    num_agreeing: int
    first_differences: dict[int, int]  # request -> position of its first different token
    environment: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Ours over theirs, of the medians, for the whole batch."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def ratio_single(self) -> float:
        """The same for one request alone."""
        return statistics.median(self.ours_single) / statistics.median(self.theirs_single)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        ratios = {"ratio": self.ratio, "ratio_single": self.ratio_single}
        return {**ratios, **dataclasses.asdict(self)}


class Theirs:
    """transformers on the same directory."""

    def __init__(self, path: Path, batch_size: int) -> None:
        from transformers import AutoModelForCausalLM

        with _quiet_transformers():
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        # Both sides must run to the asked length. With an end token set, `min_new_tokens` would
        # forbid it and so change the text; without one it is a token like any other, as in
        # `ignore_eos`.
        self.model.generation_config.eos_token_id = None
        self.batch_size = batch_size

    def generate(self, workload: Workload) -> list[list[int]]:
        """Greedy ids of every request, cut to the length it asked for."""
        results: list[list[int]] = []
        for start in range(0, len(workload.prompts), self.batch_size):
            stop = start + self.batch_size
            lengths = workload.output_lens[start:stop]
            rows = self._batch(workload.prompts[start:stop], max(lengths))
            results += [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return results

    def _batch(self, prompts: list[list[int]], length: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)  # [B, T], padded on the left
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
        )
        return output[:, width:].tolist()


class Ours:
    """This engine, as a user gets it on a CPU."""

    def __init__(self, path: Path, workload: Workload) -> None:
        self.llm = LLM(str(path), device="cpu", max_model_len=workload.longest)

    def generate(self, workload: Workload) -> list[list[int]]:
        """Greedy ids of every request, from an empty prefix cache."""
        self.llm.reset_prefix_cache()
        params = [
            # Ids in and out on both sides: nobody's tokenizer is part of it.
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in workload.output_lens
        ]
        prompts = [{"prompt_token_ids": ids} for ids in workload.prompts]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


Sides = dict[str, Ours | Theirs]


def compare(
    path: Path,
    workload: Workload,
    *,
    batch_size: int = 8,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measure both; `progress` is told of each of `4 * repeats` runs when it is done.

    Raises ValueError where a size is no size.
    """
    for name, value in (("batch_size", batch_size), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    sides: Sides = {"minivllm": Ours(path, workload), "transformers": Theirs(path, batch_size)}
    rates, texts = _measure(sides, workload, repeats, progress)
    differences = first_differences(texts["minivllm"], texts["transformers"])
    return Comparison(
        workload=workload.name,
        num_requests=len(workload.prompts),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=workload.num_output_tokens,
        batch_size=batch_size,
        threads=torch.get_num_threads(),
        ours=rates["minivllm", "batch"],
        theirs=rates["transformers", "batch"],
        ours_single=rates["minivllm", "one request"],
        theirs_single=rates["transformers", "one request"],
        num_agreeing=len(workload.prompts) - len(differences),
        first_differences=differences,
        environment=stamp(torch.device("cpu")),
    )


def _measure(
    sides: Sides, workload: Workload, repeats: int, progress: Callable[[str], None]
) -> tuple[dict[tuple[str, str], list[float]], dict[str, list[list[int]]]]:
    """Rates by (side, part), one a repeat; and the ids that each side gave for the batch."""
    parts = {"batch": workload, "one request": single_request(workload)}
    rates: dict[tuple[str, str], list[float]] = {(s, p): [] for s in sides for p in parts}
    texts: dict[str, list[list[int]]] = {}
    for side in sides.values():
        side.generate(_warm_up(workload))
    for _ in range(repeats):
        for part, load in parts.items():
            for name, side in sides.items():
                started = time.perf_counter()
                ids = side.generate(load)
                seconds = time.perf_counter() - started
                rates[name, part].append(load.num_output_tokens / seconds)
                progress(f"{name}, {part}: {rates[name, part][-1]:,.1f} tokens/s")
                if part == "batch":
                    texts[name] = ids
    return rates, texts


def single_request(workload: Workload) -> Workload:
    """The request with the longest output, alone."""
    index = max(range(len(workload.prompts)), key=workload.output_lens.__getitem__)
    return Workload("single", [workload.prompts[index]], [workload.output_lens[index]], 0.0)


def first_differences(ours: list[list[int]], theirs: list[list[int]]) -> dict[int, int]:
    """Request -> the first position where the two texts part; equal ones are left out."""
    found: dict[int, int] = {}
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            pairs = enumerate(zip(a, b))
            found[index] = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
    return found


def _warm_up(workload: Workload) -> Workload:
    lengths = [min(4, length) for length in workload.output_lens]
    return Workload("warm-up", workload.prompts, lengths, 0.0)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No loading bar of theirs: this program has its own notes."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
