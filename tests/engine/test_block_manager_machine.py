"""Block manager and prefix cache under random calls: the invariants of cases K30 and K39.

A model of the cache content runs beside it: what each slot holds, as the whole history up to it. A
look-up that returned a block with any other content would be seen at once.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from harness import check_index, check_sharing
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
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams

SETTINGS = settings(
    max_examples=130,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LEAST_STEPS = 5_000  # of each variant; asserted, so that a change of hypothesis cannot hide it


class BlockMachine(RuleBasedStateMachine):
    """Allocate, append, store, register, preempt, free and reset, in any order."""

    manager_class: type[BlockManager] = BlockManager
    steps = 0
    hits = 0

    @initialize(num_blocks=st.integers(1, 10), block_size=st.integers(1, 4))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.manager = self.manager_class(num_blocks, block_size)
        self.live: list[Sequence] = []  # hold blocks
        self.queued: list[Sequence] = []  # preempted: hold none
        self.gone: list[Sequence] = []
        self.slots: dict[int, tuple[int, ...]] = {}  # slot -> history stored there
        self.made = 0

    def _count(self) -> None:
        type(self).steps += 1

    def _pick(self, seqs: list[Sequence], data: st.DataObject) -> Sequence:
        return seqs[data.draw(st.integers(0, len(seqs) - 1))]

    def _allocate(self, seq: Sequence) -> bool:
        free, table = self.manager.num_free, list(seq.block_table)
        if not self.manager.can_allocate(seq):
            assert self.manager.num_free == free and seq.block_table == table
            return False
        cached = self.manager.allocate(seq)
        assert len(seq.block_table) == -(-seq.num_tokens // self.size)
        assert cached % self.size == 0 and cached < seq.num_tokens  # one token is always computed
        for position in range(cached):
            assert self._read(seq, position) == tuple(seq.token_ids[: position + 1])
        seq.num_computed = cached
        type(self).hits += cached > 0
        self.live.append(seq)
        return True

    def _slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.size] * self.size + position % self.size

    def _read(self, seq: Sequence, position: int) -> tuple[int, ...] | None:
        return self.slots.get(self._slot(seq, position))

    @rule(
        length=st.integers(0, 12),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=3),
        asks=st.booleans(),
        compute=st.booleans(),
    )
    def allocate(self, length: int, tail: list[int], asks: bool, compute: bool) -> None:
        """A prompt with a common beginning; `compute`: its first step is done at once."""
        self._count()
        tokens = [1] * length + tail
        params = SamplingParams(prompt_logprobs=1 if asks and len(tokens) % 5 == 0 else None)
        self.made += 1
        seq = Sequence(self.made, tokens, params)
        if self._allocate(seq) and compute:
            self._store(seq, seq.num_tokens - seq.num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(1, 2))
    def append(self, data: st.DataObject, token: int) -> None:
        self._count()
        seq = self._pick(self.live, data)
        if seq.num_computed < seq.num_tokens:  # as the engine does: a token needs those before it
            self._store(seq, seq.num_tokens - seq.num_computed)
        seq.token_ids.append(token)
        needed = -(-seq.num_tokens // self.size) - len(seq.block_table)
        assert self.manager.can_append(seq) == (needed <= self.manager.num_free)
        if self.manager.can_append(seq):
            before = len(seq.block_table)
            self.manager.append(seq)
            assert len(seq.block_table) - before == needed in (0, 1)
        else:
            seq.token_ids.pop()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def store(self, data: st.DataObject, count: int) -> None:
        self._count()
        seq = self._pick(self.live, data)
        self._store(seq, min(count, seq.num_tokens - seq.num_computed))

    def _store(self, seq: Sequence, count: int) -> None:
        """Compute the next tokens, then tell the manager, as a step that has been read does."""
        for position in range(seq.num_computed, seq.num_computed + count):
            block = seq.block_table[position // self.size]
            assert self.manager.ref_counts[block] == 1, "a shared block is written"
            self.slots[self._slot(seq, position)] = tuple(seq.token_ids[: position + 1])
        seq.num_computed += count
        self.manager.register(seq, seq.num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._count()
        seq = self._pick(self.live, data)
        self.live.remove(seq)
        self.manager.free(seq)
        assert not seq.block_table
        self.queued.append(seq)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self._count()
        seq = self._pick(self.queued, data)
        if self._allocate(seq):
            self.queued.remove(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), twice=st.booleans())
    def finish(self, data: st.DataObject, twice: bool) -> None:
        self._count()
        seq = self._pick(self.live, data)
        self.live.remove(seq)
        self.gone.append(seq)
        self.manager.free(seq)
        if twice:
            self.manager.free(seq)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        self._count()
        free = list(self.manager.free_blocks)
        self.manager.free(self._pick(self.gone, data))
        assert list(self.manager.free_blocks) == free

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        self._count()
        if really == 0:
            self.manager.reset()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, tables = self.manager, [seq.block_table for seq in self.live]
        counts = [sum(block in table for table in tables) for block in range(manager.num_blocks)]
        assert manager.ref_counts == counts
        assert set(manager.free_blocks) == {b for b, count in enumerate(counts) if count == 0}
        assert manager.num_free + manager.num_used == manager.num_blocks
        manager.check(self.live)
        check_index(manager)
        check_sharing(self.live, manager)
        for seq in self.live:  # nobody has overwritten what a sequence has computed
            for position in range(seq.num_computed):
                assert self._read(seq, position) == tuple(seq.token_ids[: position + 1])
        if isinstance(manager, PrefixCache):
            for block, content in manager.cached.items():
                last = self.slots[block * self.size + self.size - 1]
                assert last[-self.size :] == content.tokens


@pytest.mark.parametrize("manager_class", [BlockManager, PrefixCache])
def test_random_calls(manager_class: type[BlockManager]) -> None:
    machine = type("Machine", (BlockMachine,), {"manager_class": manager_class})
    run_state_machine_as_test(machine, settings=SETTINGS)
    assert machine.steps >= LEAST_STEPS
    assert (machine.hits > 100) == (manager_class is PrefixCache)
    print(f"{machine.steps} steps, {machine.hits} allocations with cached blocks")
