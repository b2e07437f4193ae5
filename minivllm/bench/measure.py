"""Runs a workload through an engine and times what a client would see.

Owns the loop and the clock. It submits all requests at once and steps until they are done, as
`LLM.generate` does. Never imports torch: the engine is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.bench.environment import stamp
from minivllm.bench.result import BenchResult, Latency
from minivllm.bench.workload import WORKLOADS, Workload
from minivllm.engine.engine import collector_paused
from minivllm.outputs import StepRecord
from minivllm.progress import Progress
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from minivllm.llm import LLM

WARM_UP_TOKENS = 16
_SETTINGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "kv_cache_dtype",
    "load_format",
    "seed",
)


def run(
    engine: LLM, workload: str | Workload = "mixed-32", repeats: int = 1, progress: bool = False
) -> BenchResult:
    """Warm up, measure `repeats` times, return the fastest.

    workload: a name of WORKLOADS, or one of your own. Raises ValueError for an unknown name.
    """
    if isinstance(workload, str):
        if workload not in WORKLOADS:
            raise ValueError(f"workload {workload!r} is unknown; one of {', '.join(WORKLOADS)}")
        workload = WORKLOADS[workload].build(engine.model_config.vocab_size)
    return best_of(measure_repeats(engine, workload, repeats, progress))


def best_of(results: Sequence[BenchResult]) -> BenchResult:
    """The result with the most output tokens a second: noise only ever takes speed away."""
    return max(results, key=lambda result: result.output_tokens_per_s)


def measure_repeats(
    engine: LLM, workload: Workload, repeats: int = 1, progress: bool = False
) -> list[BenchResult]:
    """One warm-up request, then the workload `repeats` times, each from an empty prefix cache.

    Raises ValueError where a sequence would be cut: then fewer tokens are made than were asked for.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    capacity = engine.stats.num_blocks * engine.stats.block_size
    for limit, what in ((engine.config.max_model_len, "max_model_len"), (capacity, "the KV pool")):
        if limit is not None and workload.longest > limit:
            raise ValueError(
                f"workload {workload.name!r} has a sequence of {workload.longest} tokens, and "
                f"{what} holds {limit}"
            )
    warm_up(engine, workload)
    results = []
    for _ in range(repeats):
        engine.reset_prefix_cache()
        results.append(measure(engine, workload, progress))
    return results


def warm_up(engine: LLM, workload: Workload) -> None:
    """One short request, so that nothing measured later is done for the first time."""
    prompt = workload.prompts[0][:WARM_UP_TOKENS]
    room = workload.longest - len(prompt)
    params = SamplingParams(
        temperature=workload.temperature,
        max_tokens=max(1, min(WARM_UP_TOKENS, room)),
        ignore_eos=True,
    )
    engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)


def measure(engine: LLM, workload: Workload, progress: bool = False) -> BenchResult:
    """Run the workload once. Clears `engine.stats` and leaves the record of this run in it."""
    engine.stats.clear()
    ttft: list[float] = []
    gaps: list[float] = []
    latest: dict[str, float] = {}  # request -> time of its newest token
    started = time.perf_counter()
    try:
        for prompt, params in zip(workload.prompts, workload.params(), strict=True):
            engine.add_request({"prompt_token_ids": prompt}, params)
        bar = Progress(len(workload.prompts), engine.stats, progress)
        with collector_paused(), bar:
            while engine.has_unfinished():
                # Not `engine.step()`: it copies every running request's whole output, which
                # `generate` does not do either, and that would be measured too.
                states = engine.engine.step()
                now = time.perf_counter()
                for state in states:
                    before = latest.get(state.request_id)
                    if before is None:
                        ttft.append(now - state.metrics.arrival_time)
                    else:
                        gaps.append(now - before)
                    latest[state.request_id] = now
                    if state.finished:
                        bar.request_done()
                bar.step_done()
        seconds = time.perf_counter() - started
    finally:
        engine.engine.reset()  # nothing to do after success
    return _result(engine, workload, seconds, ttft, gaps)


def _result(
    engine: LLM, workload: Workload, seconds: float, ttft: list[float], gaps: list[float]
) -> BenchResult:
    stats = engine.stats
    decode = [step for step in stats.steps if step.phase == "decode"]
    prefill = [step for step in stats.steps if step.phase != "decode"]
    peak = stats.peak_blocks_in_use
    return BenchResult(
        workload=workload.name,
        num_requests=len(workload.prompts),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=stats.generated_tokens,
        seconds=seconds,
        ttft=Latency.of(ttft),
        inter_token=Latency.of(gaps),
        num_steps=len(stats.steps),
        prefill_seconds=_seconds(prefill),
        prefill_tokens=sum(step.num_tokens - step.num_decode for step in prefill),
        decode_seconds=_seconds(decode),
        decode_tokens=sum(step.num_decode for step in decode),
        tokens_computed=stats.tokens_computed,
        cached_tokens=stats.cached_tokens,
        preemptions=stats.preemptions,
        block_size=stats.block_size,
        num_blocks=stats.num_blocks,
        peak_blocks=peak,
        kv_bytes=stats.kv_bytes,
        peak_kv_bytes=peak * (stats.kv_bytes // max(stats.num_blocks, 1)),
        settings=settings(engine),
        environment=stamp(device_of(engine)),
    )


def device_of(engine: LLM) -> torch.device:
    """Where the engine computes."""
    runner: Any = engine.engine.runner  # the loop's own view of it is narrower
    return runner.device


def settings(engine: LLM) -> dict[str, Any]:
    """The engine options that a number depends on, as they were resolved."""
    runner: Any = engine.engine.runner
    return {
        "attention_backend": engine.backend,
        "dtype": str(next(runner.model.parameters()).dtype).removeprefix("torch."),
        "depth": engine.engine.depth,
        **{name: getattr(engine.config, name) for name in _SETTINGS},
    }


def _seconds(steps: Sequence[StepRecord]) -> float:
    return sum(step.seconds for step in steps)
