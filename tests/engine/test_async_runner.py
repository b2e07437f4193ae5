"""The checks of the fake runner fail where they must: a check that never fails checks nothing.

Each test breaks one rule of the engine on purpose and expects the fake to notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness import Setup, make_setup, random_request
from test_random_workloads import run_workload

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def simple_run(depth: int = 1, **options) -> Setup:
    setup = make_setup(depth=depth, num_blocks=9, **options)
    for number in range(3):
        setup.add(str(number), [1] * 6, PARAMS, number)
    setup.run()
    return setup


def many_runs() -> None:
    for seed in range(60):
        for depth in (0, 1):
            run_workload(seed, depth, late=True, aborts=seed % 2 == 0)


def release_at_once(self: Scheduler, seq: Sequence) -> None:
    seq.steps_in_flight, kept = 0, seq.steps_in_flight
    self._release(seq)
    seq.steps_in_flight = kept


def register_everything(self: PrefixCache, seq: Sequence) -> int:
    cached = original_allocate(self, seq)
    self.register(seq, len(seq.token_ids))
    return cached


def take_without_forgetting(self: PrefixCache) -> int:
    return BlockManager._take(self)


def match_by_tokens_alone(self: PrefixCache, token_ids: list[int]) -> list[int]:
    """As if a block's content were its own tokens, whatever stands before them."""
    blocks: list[int] = []
    for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
        tokens = tuple(token_ids[start : start + self.block_size])
        found = [block for block, content in self.cached.items() if content.tokens == tokens]
        if not found or found[0] in blocks:
            break
        blocks.append(found[0])
    return blocks


def free_without_counting(self: BlockManager, seq: Sequence) -> None:
    for block in seq.block_table:
        self.ref_counts[block] = 0
        self.release(block)
    seq.block_table.clear()


def share_the_last_block_too(self: PrefixCache, seq: Sequence) -> int:
    cached = original_allocate(self, seq)
    for block in self.cached:
        if self.ref_counts[block] and block not in seq.block_table:
            last = seq.block_table[-1]
            self.ref_counts[last] -= 1
            self.release(last)
            seq.block_table[-1] = block
            self.ref_counts[block] += 1
            break
    return cached


def grow_one_late(self: BlockManager, seq: Sequence) -> None:
    while len(seq.block_table) < self.blocks_needed(seq.num_tokens - 1):
        seq.block_table.append(self._take())


original_allocate = PrefixCache.allocate
FAULTS: dict[str, tuple[type, str, Callable]] = {
    "blocks are released with a step in flight": (
        Scheduler, "_release_or_drain", release_at_once,
    ),
    "blocks are findable before their step is done": (
        PrefixCache, "allocate", register_everything,
    ),
    "a reused block keeps its hash": (PrefixCache, "_take", take_without_forgetting),
    "the prefix of a block is not looked at": (PrefixCache, "match", match_by_tokens_alone),
    "a shared block is freed with its first owner": (
        BlockManager, "free", free_without_counting,
    ),
    "a block is shared that is written": (PrefixCache, "allocate", share_the_last_block_too),
    "a block too few": (BlockManager, "append", grow_one_late),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, function = FAULTS[fault]
    monkeypatch.setattr(owner, name, function)
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)):
        many_runs()


def plan_fault(setup: Setup, change: Callable) -> None:
    """Pass every plan through `change` on its way to the runner."""
    launch = setup.runner.launch
    setup.runner.launch = lambda plan: launch(change(plan))


def test_tokens_the_host_cannot_know_are_noticed() -> None:
    setup = make_setup(depth=1)

    def guess(plan):
        rows = [replace(row, token_ids=row.token_ids or [1]) for row in plan.rows]
        return replace(plan, rows=rows)

    plan_fault(setup, guess)
    setup.add("a", [1, 2], PARAMS)
    with pytest.raises(AssertionError, match="not known to the host yet"):
        setup.run()


def test_tokens_that_nobody_samples_are_noticed() -> None:
    setup = make_setup(depth=0)
    plan_fault(setup, lambda plan: replace(plan, rows=[replace(plan.rows[0], token_ids=[1])]))
    setup.add("a", [1, 2], PARAMS)
    with pytest.raises(AssertionError, match="nobody is sampling token 1"):
        setup.run()


def test_a_changed_plan_in_flight_is_noticed() -> None:
    setup = make_setup(depth=1)
    setup.add("a", [1, 2], PARAMS)
    setup.step()
    setup.engine.in_flight[0][0].rows[0].block_table.append(5)
    with pytest.raises(AssertionError, match="a plan in flight was changed"):
        setup.run()


def test_wrong_tokens_and_tables_are_noticed() -> None:
    for change, match in (
        (lambda row: replace(row, token_ids=[9] * len(row.token_ids)), "its text is"),
        (lambda row: replace(row, block_table=row.block_table[::-1]), "foreign|blocks moved"),
    ):
        setup = make_setup(depth=0)
        plan_fault(setup, lambda plan, c=change: replace(plan, rows=[c(row) for row in plan.rows]))
        setup.add("a", [1] * 6, PARAMS)
        with pytest.raises(AssertionError, match=match):
            setup.run()


def test_steps_are_read_in_order() -> None:
    setup = make_setup(depth=1)
    setup.add("a", [1] * 6, PARAMS)
    setup.step()
    plan = setup.scheduler.schedule()
    assert plan is not None
    with pytest.raises(AssertionError, match="in the order of their launches"):
        setup.runner.collect(setup.runner.launch(plan))


def test_late_means_late() -> None:
    """Nothing is computed at launch; late=False computes when a token is needed."""
    for late, computed in ((True, 0), (False, 1)):
        setup = make_setup(depth=1, late=late)
        setup.add("a", [1] * 6, PARAMS)
        setup.runner.launch(setup.scheduler.schedule())
        assert setup.device.rows_checked == 0
        setup.runner.launch(setup.scheduler.schedule())
        assert setup.device.rows_checked == computed


def test_the_simple_run_is_right() -> None:
    for depth in (0, 1):
        setup = simple_run(depth)
        assert all(len(out.outputs[0].token_ids) == 12 for out in setup.outputs.values())


def test_requests_are_varied() -> None:
    import random

    rng = random.Random(0)
    requests = [random_request(rng, 20) for _ in range(200)]
    assert len({tuple(prompt[:4]) for prompt, _, _ in requests}) < 100  # beginnings are shared
    assert {params.n for _, params, _ in requests} == {1, 2, 3}
