"""Scheduler, block manager and steps in flight under random calls, at depth 0 and 1.

Launch and collect are separate rules, so that requests come, are aborted, stopped or preempted at
any moment of a step's life. The fake device checks the content of every block that a row reads.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from async_runner import EOS, AsyncRunner, ContentDevice
from harness import check_scheduler
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence, Status
from minivllm.sampling_params import SamplingParams

SETTINGS = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
VARIANTS = list(itertools.product((0, 1), (False, True), (True, False)))
LEAST_STEPS = 4_500  # of each of the 8 variants: 36,000 together, the final runs not counted


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, steps, aborts, stops, preemptions and failures in any order."""

    depth = 0
    prefix_cache = True
    chunked = True
    steps = 0
    preemptions = 0
    hits = 0

    @initialize(
        num_blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        seats=st.integers(1, 4),
        spare=st.integers(0, 9),
        late=st.booleans(),
        eos_every=st.sampled_from((0, 5)),
    )
    def build(
        self, num_blocks: int, block_size: int, seats: int, spare: int, late: bool, eos_every: int
    ) -> None:
        manager = (PrefixCache if self.prefix_cache else BlockManager)(num_blocks, block_size)
        self.scheduler = Scheduler(
            manager,
            max_num_seqs=seats,
            max_num_batched_tokens=seats + spare if self.chunked else 30,
            max_model_len=30,
            enable_chunked_prefill=self.chunked,
        )
        self.longest = min(num_blocks * block_size - 1, 29)
        self.device = ContentDevice(num_blocks, block_size, eos_every=eos_every)
        self.runner = AsyncRunner(self.device, block_size, late=late)
        self.runner.scheduler = self.scheduler
        self.in_flight: list = []
        self.next_id = 0

    def _count(self) -> None:
        type(self).steps += 1

    def _pick(self, seqs: list[Sequence], data: st.DataObject) -> Sequence:
        return seqs[data.draw(st.integers(0, len(seqs) - 1))]

    @property
    def unfinished(self) -> list[Sequence]:
        """Sequences that a user could still abort."""
        if not hasattr(self, "scheduler"):
            return []
        return [seq for seq in self.scheduler.sequences.values() if not seq.finished]

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        n=st.sampled_from((1, 1, 1, 2, 3)),
        max_tokens=st.sampled_from((1, 2, 4, 9, None)),
        asks=st.sampled_from((None, None, None, 0)),
    )
    def add(self, prompt: list[int], n: int, max_tokens: int | None, asks: int | None) -> None:
        self._count()
        prompt = prompt[: self.longest]
        params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=asks)
        leader = None
        for index in range(n):
            seq = Sequence(
                self.next_id,
                prompt,
                params,
                sample_index=index,
                eos_ids=frozenset({EOS}),
                leader=leader if self.prefix_cache else None,
            )
            leader = leader or seq
            self.next_id += 1
            self.device.add(seq.seq_id, prompt)
            self.scheduler.add(seq)

    @precondition(lambda self: len(self.in_flight) <= self.depth)
    @rule()
    def launch(self) -> None:
        self._count()
        self._launch()

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        self._count()
        self._collect()

    def _launch(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            # Nothing to plan is right only where a step is to be read, or nothing is left.
            assert self.in_flight or not self.scheduler.has_unfinished
            return False
        assert 0 < plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({row.seq_id for row in plan.rows}) == len(plan.rows)
        assert all(row.num_tokens == 1 for row in plan.rows[: plan.num_decode])
        self.in_flight.append((plan, self.runner.launch(plan)))
        return True

    def _collect(self) -> None:
        plan, ticket = self.in_flight.pop(0)
        result = self.runner.collect(ticket)
        for seq in self.scheduler.complete(plan, result.token_ids):
            known = self.device.history[seq.seq_id]
            assert seq.token_ids == known[: len(seq.token_ids)]

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), stop=st.booleans(), twice=st.booleans())
    def end(self, data: st.DataObject, stop: bool, twice: bool) -> None:
        """An abort, or a stop string found in the text."""
        self._count()
        seq = self._pick(self.unfinished, data)
        reason = ("stop", "text") if stop else ("abort", None)
        self.scheduler.finish(seq, *reason)
        if twice:
            self.scheduler.finish(seq, "abort")
        assert (seq.finish_reason, seq.stop_reason) == reason

    @precondition(lambda self: hasattr(self, "scheduler") and self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._count()
        self.scheduler.preempt(self._pick(list(self.scheduler.running.values()), data))

    @rule(what=st.integers(0, 39))
    def rare(self, what: int) -> None:
        """A step that fails (everything is dropped), or a user who empties the cache."""
        self._count()
        if what == 0:
            self.in_flight.clear()
            self.runner.in_flight.clear()
            self.scheduler.abort_all()
            assert not self.scheduler.sequences
        elif what == 1:
            self.scheduler.block_manager.reset()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            check_scheduler(self.scheduler)
            self.runner.check_host()
            for seq in self.scheduler.sequences.values():
                assert not (seq.status is Status.FINISHED and seq.steps_in_flight == 0)

    def teardown(self) -> None:
        """Whatever state it is in, all of it ends, in a number of steps that can be told."""
        if not hasattr(self, "scheduler"):
            return
        bound = step_bound(self.scheduler)
        while self.scheduler.has_unfinished or self.in_flight:
            assert bound > 0, "no end in sight"
            bound -= 1
            launched = len(self.in_flight) <= self.depth and self._launch()
            if self.in_flight and (not launched or len(self.in_flight) > self.depth):
                self._collect()
            self.holds()
        assert self.scheduler.block_manager.num_used == 0
        type(self).preemptions += self.scheduler.num_preemptions
        type(self).hits += self.device.hits_checked


def step_bound(scheduler: Scheduler) -> int:
    """Steps within which everything must end.

    The oldest running sequence is never preempted and gets a token every step (or a chunk, or one
    step of waiting for blocks on their way): two steps a token, for one sequence after the other.
    """
    return 10 + 2 * sum(seq.max_total + 2 for seq in scheduler.sequences.values())


@pytest.mark.parametrize(("depth", "prefix_cache", "chunked"), VARIANTS)
def test_random_calls(depth: int, prefix_cache: bool, chunked: bool) -> None:
    variant = {"depth": depth, "prefix_cache": prefix_cache, "chunked": chunked}
    machine = type("Machine", (SchedulerMachine,), variant)
    run_state_machine_as_test(machine, settings=SETTINGS)
    print(f"{machine.steps} steps, {machine.preemptions} preemptions, {machine.hits} hits")
    assert machine.steps >= LEAST_STEPS
    assert machine.preemptions > 50
    assert (machine.hits > 50) == prefix_cache
