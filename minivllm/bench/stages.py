"""Measures any generation of the engine in the same words: `bench.run` of the lessons.

Owns the way from a stage to a `BenchResult`. The first stages know no requests and no steps; they
keep a log of their model's calls, and from that log come the times and the counts. Never generates
by itself. Lessons 01, 05, 06 and the ladder.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minivllm.bench import measure
from minivllm.bench.environment import stamp
from minivllm.bench.result import BenchResult, Latency
from minivllm.bench.workload import WORKLOADS, Workload

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.stages.build import EngineStage, Stage


def run(
    engine: LLM | Stage | EngineStage,
    workload: str | Workload = "mixed-32",
    repeats: int = 1,
    progress: bool = False,
) -> BenchResult:
    """Warm up, measure `repeats` times, return the fastest: for `LLM` and every stage.

    workload: a name of WORKLOADS, or one of your own. Stages are greedy whatever temperature it
    has. ValueError for an unknown name, or a sequence longer than the stage was built for.
    """
    from minivllm.llm import LLM

    if isinstance(engine, LLM):
        return measure.run(engine, workload, repeats, progress)
    from minivllm.stages.build import EngineStage

    if isinstance(workload, str):
        if workload not in WORKLOADS:
            raise ValueError(f"workload {workload!r} is unknown; one of {', '.join(WORKLOADS)}")
        workload = WORKLOADS[workload].build(engine.vocab_size)
    workload = dataclasses.replace(workload, temperature=0.0)
    if isinstance(engine, EngineStage):
        result = measure.run(engine.llm, workload, repeats, progress)
        settings = {**_who(engine), **result.settings}
        return dataclasses.replace(result, settings=settings)
    if workload.longest > engine.max_len:
        raise ValueError(
            f"workload {workload.name!r} has a sequence of {workload.longest} tokens, and the "
            f"stage was built with max_len={engine.max_len}"
        )
    engine.generate([workload.prompts[0][:8]], 2)
    return measure.best_of([measure_stage(engine, workload) for _ in range(repeats)])


def measure_stage(stage: Stage, workload: Workload) -> BenchResult:
    """Run the workload once, request after request; leaves the log of this run in the model."""
    calls = stage.model.calls
    calls.clear()
    ttft: list[float] = []
    gaps: list[float] = []
    prefill_seconds, peak = 0.0, 0
    started = time.perf_counter()
    for prompt, count in zip(workload.prompts, workload.output_lens, strict=True):
        first = len(calls)
        stage.generate([prompt], count)
        # A token is known when the next call begins: on a GPU a call returns before it is done,
        # and reading the token is what waits.
        arrivals = [call.started for call in calls[first + 1 :]] + [time.perf_counter()]
        # All requests are there from the start: the later ones wait for the earlier.
        ttft.append(arrivals[0] - started)
        gaps += [after - before for before, after in pairwise(arrivals)]
        prefill_seconds += arrivals[0] - calls[first].started
        # Within a request the cache only grows, so its end is its peak.
        peak = max(peak, stage.kv_bytes_used)
    seconds = time.perf_counter() - started
    reserved = stage.kv_bytes
    return BenchResult(
        workload=workload.name,
        num_requests=len(workload.prompts),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=workload.num_output_tokens,
        seconds=seconds,
        ttft=Latency.of(ttft),
        inter_token=Latency.of(gaps),
        num_steps=len(calls),
        prefill_seconds=prefill_seconds,
        prefill_tokens=workload.num_prompt_tokens,
        decode_seconds=sum(gaps),
        decode_tokens=len(gaps),
        tokens_computed=stage.tokens_computed,
        cached_tokens=0,
        preemptions=0,
        # A contiguous cache is one block of the greatest length; without a cache there is none.
        block_size=stage.max_len,
        num_blocks=int(reserved > 0),
        peak_blocks=int(reserved > 0),
        kv_bytes=reserved,
        peak_kv_bytes=peak,
        settings={
            **_who(stage),
            "dtype": str(stage.model.dtype).removeprefix("torch."),
            "max_len": stage.max_len,
        },
        environment=stamp(stage.model.device),
    )


def _who(stage: Stage | EngineStage) -> dict[str, Any]:
    return {"stage": stage.name, "model": stage.model_name, "mine": list(stage.mine)}


def token_latency(
    engine: Stage | EngineStage, lengths: Sequence[int], tokens: int = 8, seed: int = 0
) -> list[float]:
    """Seconds for one more token behind a text of each length: the median of `tokens` gaps."""
    rng = random.Random(seed)
    top = engine.vocab_size - 1
    found = []
    for length in lengths:
        prompt = [rng.randint(0, top) for _ in range(length)]
        # One token more: the first is the prefill's.
        result = run(engine, Workload(f"length {length}", [prompt], [tokens + 1], 0.0))
        found.append(result.inter_token.p50)
    return found
