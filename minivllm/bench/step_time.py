"""Times single decode steps: the device's part alone, and the whole step as a run has it.

Owns the making of a step out of nothing but context lengths, and its repetition. Never runs a
prompt for that: attention takes as long over stale keys as over good ones. Leaves the engine empty
and its prefix cache cleared. Lesson 15.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from minivllm.bench.workload import Workload
from minivllm.engine.decode_step import decode_step
from minivllm.engine.input_batch import pack_decode
from minivllm.engine.step_plan import RowSampling, ScheduledRow, StepPlan

if TYPE_CHECKING:
    from minivllm.llm import LLM

STEADY_STEPS = 32
SKIPPED = 4  # the first steps after the last prompt upload the rows that are new


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """Medians over consecutive decode steps of a run, and the device's part of such a step.

    host_ms: what of the host's work nothing hides; None on a CPU, which is the device itself: its
    two medians are of the same work at two times.
    """

    rows: int
    context_tokens: int
    wall_ms: float
    device_ms: float
    host_ms: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def contexts_at(workload: Workload, step: int) -> list[int]:
    """Context lengths at a decode step of a workload that runs all at once, longest first."""
    pairs = zip(workload.prompts, workload.output_lens, strict=True)
    return sorted((len(prompt) + step for prompt, length in pairs if length > step), reverse=True)


def fits(llm: LLM, contexts: Sequence[int]) -> bool:
    """Whether the engine can hold such a step at all."""
    runner: Any = llm.engine.runner
    blocks = sum(-(-context // runner.block_size) for context in contexts)
    limit = llm.config.max_model_len
    assert limit is not None
    seats = 0 < len(contexts) <= runner.state.num_slots
    return seats and blocks <= runner.num_blocks and max(contexts) <= limit


def check_fits(llm: LLM, contexts: Sequence[int]) -> None:
    """ValueError with the limits where the engine cannot hold such a step."""
    if not fits(llm, contexts):
        runner: Any = llm.engine.runner
        raise ValueError(
            f"a step of {len(contexts)} rows and {sum(contexts)} tokens does not fit: "
            f"max_num_seqs={runner.state.num_slots}, max_model_len={llm.config.max_model_len}, and "
            f"the KV cache has {runner.num_blocks} blocks of {runner.block_size} tokens"
        )


def decode_plan(contexts: Sequence[int], block_size: int, num_blocks: int) -> StepPlan:
    """A step of one row a context (the new token included), over blocks in a random order."""
    free = list(range(num_blocks))
    random.Random(0).shuffle(free)
    rows = []
    for index, context in enumerate(contexts):
        blocks = [free.pop() for _ in range(-(-context // block_size))]
        sampling = RowSampling(0.6, 0, 1.0, 0.0, index, 0, context)
        # Below zero, so that no sequence of the engine has this id.
        rows.append(
            ScheduledRow(-1 - index, 0, context - 1, context, [index % 7], blocks, sampling)
        )
    return StepPlan(rows, len(rows))


@torch.inference_mode()
def decode_seconds(llm: LLM, contexts: Sequence[int], calls: int = 12) -> float:
    """Median seconds of the device's part of a decode step, from embedding to sampled token.

    On a GPU the steps are queued one behind the other and timed by CUDA events: with graphs no time
    of the host is in it, without them as much as the device waits for. Raises ValueError where the
    engine cannot hold the step.
    """
    check_fits(llm, contexts)
    runner: Any = llm.engine.runner
    contexts = sorted(contexts, reverse=True)  # as the runner sorts them
    plan = decode_plan(contexts, runner.block_size, runner.num_blocks)
    slots = runner.state.assign(plan)
    runner.state.prepare_decode(plan.rows, slots)
    step = _step_call(runner, plan, slots)  # every call decodes the same position
    try:
        times = (_time_on_gpu if runner.device.type == "cuda" else _time_on_cpu)(step, calls)
    finally:
        llm.reset_prefix_cache()  # blocks that it knew have been written to
    return statistics.median(times)


def _step_call(runner: Any, plan: StepPlan, slots: list[int]) -> Callable[[], object]:
    numbers = pack_decode(plan.rows, slots, runner.block_size)
    if runner.graphs is not None:
        return partial(runner.graphs.decode.replay, numbers)
    return partial(
        decode_step,
        runner.model,
        runner.ops,
        runner.state,
        (runner.kv_cache, runner.kv_scales),
        torch.from_numpy(numbers).to(runner.device),
        table_width=max(len(row.block_table) for row in plan.rows),
        flags=runner.state.flags(slots),
    )


def _time_on_gpu(call: Callable[[], object], calls: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 3)]
    for mark in marks:
        call()
        mark.record()
    marks[-1].synchronize()
    # The first two may have waited for the host; behind them the queue was never empty.
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks[2:])]


def _time_on_cpu(call: Callable[[], object], calls: int) -> list[float]:
    call()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def steady_step(llm: LLM, workload: Workload, steps: int = STEADY_STEPS) -> SteadyStep | None:
    """Run the workload up to `steps` decode steps in a row; None where it has too few."""
    engine: Any = llm.engine
    walls: list[float] = []
    contexts: list[list[int]] = []
    llm.reset_prefix_cache()
    engine.stats.clear()
    try:
        for prompt, params in zip(workload.prompts, workload.params(), strict=True):
            llm.add_request({"prompt_token_ids": prompt}, params)
        while llm.has_unfinished() and len(walls) < SKIPPED + steps:
            recorded, started = len(engine.stats.steps), time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - started
            if len(engine.stats.steps) == recorded or engine.stats.steps[-1].phase != "decode":
                walls, contexts = [], []
                continue
            walls.append(seconds)
            contexts.append([seq.num_computed for seq in engine.scheduler.running.values()])
    finally:
        engine.reset()
    walls, contexts = walls[SKIPPED:], [row for row in contexts[SKIPPED:] if fits(llm, row)]
    if not walls or not contexts:
        return None
    middle = contexts[len(contexts) // 2]
    wall, device = 1e3 * statistics.median(walls), 1e3 * decode_seconds(llm, middle)
    host = None if engine.runner.device.type == "cpu" else wall - device
    return SteadyStep(len(middle), sum(middle), wall, device, host)
