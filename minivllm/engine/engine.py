"""The loop: plan a step, launch it, read the one before, hand out what is new.

Owns the steps in flight and the requests. At depth 0 a step is read as soon as it is launched; at
depth 1 the next one is launched first, so that planning hides behind the device's work. Never
computes and never decides: scheduler and runner meet here. Lesson 10.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from minivllm.engine.output_processor import RequestState
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.engine.step_plan import StepPlan, StepResult
from minivllm.outputs import EngineStats, StepRecord
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import Tokenizer


class Runner(Protocol):
    """What the loop needs of a runner."""

    def launch(self, plan: StepPlan) -> Any:
        """Start a step."""

    def collect(self, launched: Any) -> StepResult:
        """Wait for a step and read it."""


class Engine:
    """Requests in, outputs out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        *,
        eos_ids: frozenset[int],
        share_prompts: bool,
        depth: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.share_prompts = share_prompts
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, Any]] = deque()
        self.requests: dict[str, RequestState] = {}
        self.stats = EngineStats(
            num_blocks=scheduler.block_manager.num_blocks,
            block_size=scheduler.block_manager.block_size,
        )
        self._owner: dict[int, RequestState] = {}  # seq_id -> request
        self._next_seq_id = 0
        self._recorded = (0, 0)  # the scheduler's preemptions and cached tokens, already in stats

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
    ) -> None:
        """Queue a request whose input has been checked."""
        sequences: list[Sequence] = []
        for index in range(params.n):
            leader = sequences[0] if sequences and self.share_prompts else None
            sequences.append(
                Sequence(
                    self._next_seq_id,
                    prompt_ids,
                    params,
                    sample_index=index,
                    seed=seed,
                    eos_ids=self.eos_ids,
                    leader=leader,
                )
            )
            self._next_seq_id += 1
        state = RequestState(request_id, prompt, prompt_ids, sequences, self.tokenizer)
        self.requests[request_id] = state
        for seq in sequences:
            self._owner[seq.seq_id] = state
            self.scheduler.add(seq)
        self.stats.prompt_tokens += len(prompt_ids)

    @property
    def has_unfinished(self) -> bool:
        """True while there is anything to plan or to read."""
        return bool(self.in_flight) or self.scheduler.has_unfinished

    def step(self) -> list[RequestState]:
        """Launch at most one step and read at most one; returns the requests that got tokens.

        An exception leaves the engine empty and usable: every request is dropped.
        """
        try:
            return self._step()
        except BaseException:  # KeyboardInterrupt too: half a step must not stay behind
            self.reset(broken=True)
            raise

    def _step(self) -> list[RequestState]:
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        blocks_in_use = self.scheduler.block_manager.num_used
        if plan is not None:
            self._check_plan(plan)
            self.in_flight.append((plan, self.runner.launch(plan)))
        elif not self.in_flight and self.scheduler.has_unfinished:
            raise RuntimeError("the scheduler has work and plans none of it")
        changed: list[RequestState] = []
        if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
            oldest, launched = self.in_flight.popleft()
            changed = self._take_in(oldest, self.runner.collect(launched))
        if plan is not None:
            self._record(plan, time.perf_counter() - started, blocks_in_use)
        return changed

    def _check_plan(self, plan: StepPlan) -> None:
        """A scheduler may be a student's: its mistakes must not become wrong text."""
        for row in plan.rows:
            needed = self.scheduler.block_manager.blocks_needed(row.end)
            if len(row.block_table) < needed:
                raise RuntimeError(
                    f"sequence {row.seq_id} was planned up to token {row.end} with "
                    f"{len(row.block_table)} blocks; it needs {needed}"
                )
            if len(row.block_table) > needed:  # blocks held in reserve: no table has room for them
                row.block_table = row.block_table[:needed]

    def _take_in(self, plan: StepPlan, result: StepResult) -> list[RequestState]:
        """Hand a step's results to scheduler and requests, in the order of its rows."""
        for row, found in zip(plan.rows, result.prompt_logprobs, strict=True):
            if found and row.seq_id in self._owner:  # else aborted while the step was in flight
                self._owner[row.seq_id].add_prompt_logprobs(row.start, found)
        logprobs = dict(zip((row.seq_id for row in plan.rows), result.logprobs, strict=True))
        changed: dict[str, RequestState] = {}
        for seq in self.scheduler.complete(plan, result.token_ids):
            state = self._owner[seq.seq_id]
            stop_string = state.add_token(seq, logprobs[seq.seq_id])
            if stop_string is not None:
                self._end_at_stop_string(seq, stop_string)
            self.stats.generated_tokens += 1
            changed[state.request_id] = state
        for state in changed.values():
            if state.finished:
                self._forget(state)
        return list(changed.values())

    def _end_at_stop_string(self, seq: Sequence, stop_string: str) -> None:
        if seq.finished:  # found in the text that its last token released: the string is the reason
            seq.finish_reason, seq.stop_reason = "stop", stop_string
        else:
            self.scheduler.finish(seq, "stop", stop_string)

    def _forget(self, state: RequestState) -> None:
        state.metrics.finished_time = time.perf_counter()
        del self.requests[state.request_id]
        for sample in state.samples:
            del self._owner[sample.seq.seq_id]

    def abort(self, request_id: str) -> RequestState | None:
        """End a request now; returns it, or None where there is no such request."""
        state = self.requests.get(request_id)
        if state is None:
            return None
        for sample in state.samples:
            if not sample.seq.finished:
                self.scheduler.finish(sample.seq, "abort")
                sample.finish()
        self._forget(state)
        return state

    def drain(self) -> None:
        """Read the steps in flight, so that their blocks come back. For after an abort."""
        while self.in_flight:
            plan, launched = self.in_flight.popleft()
            self._take_in(plan, self.runner.collect(launched))

    def reset(self, broken: bool = False) -> None:
        """Drop all requests and all steps in flight; `broken` after a step that failed half-way."""
        try:
            while self.in_flight:
                # Waited for, so that the device is idle; read by nobody. It may be what has failed.
                with contextlib.suppress(Exception):
                    self.runner.collect(self.in_flight.popleft()[1])
        finally:  # also where Ctrl-C is pressed again while this waits
            self.in_flight.clear()
            self.scheduler.abort_all(broken)
            self.requests.clear()
            self._owner.clear()

    def _record(self, plan: StepPlan, seconds: float, blocks_in_use: int) -> None:
        scheduler, stats = self.scheduler, self.stats
        prefills = len(plan.rows) - plan.num_decode
        # Since the last record, not since this call: a call may preempt and then plan nothing.
        lost = scheduler.num_preemptions - self._recorded[0]
        found = scheduler.num_cached_tokens - self._recorded[1]
        self._recorded = (scheduler.num_preemptions, scheduler.num_cached_tokens)
        stats.cached_tokens += found
        stats.preemptions += lost
        stats.steps.append(
            StepRecord(
                phase="decode" if not prefills else "mixed" if plan.num_decode else "prefill",
                num_rows=len(plan.rows),
                num_decode=plan.num_decode,
                num_tokens=plan.num_tokens,
                seconds=seconds,
                blocks_in_use=blocks_in_use,
                num_waiting=len(scheduler.waiting),
                num_running=len(scheduler.running),
                preemptions=lost,
                cached_tokens=found,
            )
        )


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No search for cycles of garbage while steps run; as before afterwards.

    A step leaves none, and a full search takes 0.1 s among the objects of 256 requests: a GPU would
    have nothing to do for that long, some three times in the 5.5 s of the standard run.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()  # inside: Ctrl-C right behind it must find the way out
        yield
    finally:
        if enabled:
            gc.enable()
