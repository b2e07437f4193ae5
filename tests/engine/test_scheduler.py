"""The three steps of planning, one by one, and the counters of a sequence."""

from __future__ import annotations

import pytest

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence, Status
from minivllm.engine.step_plan import StepPlan
from minivllm.sampling_params import SamplingParams


def make(
    *,
    blocks: int = 20,
    block_size: int = 4,
    seats: int = 4,
    budget: int = 16,
    max_model_len: int = 64,
    chunked: bool = True,
    manager_class: type[BlockManager] = BlockManager,
) -> Scheduler:
    return Scheduler(
        manager_class(blocks, block_size),
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
    )


def add(scheduler: Scheduler, seq_id: int, prompt: int | list[int], **fields) -> Sequence:
    tokens = [seq_id + 1] * prompt if isinstance(prompt, int) else prompt
    fields = {"temperature": 0, "max_tokens": 20, **fields}
    seq = Sequence(seq_id, tokens, SamplingParams(**fields), eos_ids=frozenset({0}))
    scheduler.add(seq)
    return seq


def shape(plan: StepPlan | None) -> tuple[int, list[tuple[int, int, int]]]:
    """(decode rows, [(seq_id, start, end)])."""
    assert plan is not None
    return plan.num_decode, [(row.seq_id, row.start, row.end) for row in plan.rows]


def finish_step(scheduler: Scheduler, plan: StepPlan | None, token: int = 7) -> list[Sequence]:
    assert plan is not None
    return scheduler.complete(plan, [token if row.sampling else None for row in plan.rows])


def step(scheduler: Scheduler, token: int = 7) -> tuple[int, list[tuple[int, int, int]]]:
    plan = scheduler.schedule()
    finish_step(scheduler, plan, token)
    return shape(plan)


# -- the budget -----------------------------------------------------------------------------------


def test_prompts_share_the_budget_in_order() -> None:
    scheduler = make(budget=10)
    for seq_id, length in enumerate((4, 9, 3)):
        add(scheduler, seq_id, length)
    assert step(scheduler) == (0, [(0, 0, 4), (1, 0, 6)])
    # A decode comes first and costs one; the cut prompt goes on; the next one gets the rest.
    assert step(scheduler) == (1, [(0, 4, 5), (1, 6, 9), (2, 0, 3)])
    assert step(scheduler) == (3, [(0, 5, 6), (1, 9, 10), (2, 3, 4)])


def test_a_long_prompt_does_not_stop_its_neighbours() -> None:
    scheduler = make(budget=5, blocks=30)
    add(scheduler, 0, 3)
    step(scheduler)
    add(scheduler, 1, 20)
    for number in range(5):
        num_decode, rows = step(scheduler)
        assert num_decode == 1 and rows[0] == (0, 3 + number, 4 + number)
        assert rows[1] == (1, 4 * number, 4 * number + 4)


def test_only_the_last_chunk_samples() -> None:
    """Case K36: an inner chunk yields no token, whatever its logits say."""
    for budget in range(1, 9):
        scheduler = make(budget=budget, seats=1)
        seq = add(scheduler, 0, 7, seed=5)
        positions = []
        while not seq.completion_ids:
            plan = scheduler.schedule()
            (row,) = plan.rows
            assert (row.sampling is not None) == (row.end == 7)
            positions += [row.sampling.position] if row.sampling else []
            assert row.token_ids == [1] * (row.end - row.start)
            assert finish_step(scheduler, plan) == ([seq] if row.sampling else [])
        assert positions == [7]


def test_the_rest_of_one_token_is_a_prompts_row() -> None:
    """A chunk that leaves one prompt token: it is no decode, nothing has been generated."""
    scheduler = make(budget=4)
    add(scheduler, 0, 5)
    assert step(scheduler) == (0, [(0, 0, 4)])
    assert step(scheduler) == (0, [(0, 4, 5)])
    assert step(scheduler) == (1, [(0, 5, 6)])


def test_two_phases() -> None:
    """Without chunks: whole prompts alone, as many as fit, or decode alone."""
    scheduler = make(budget=10, chunked=False, max_model_len=10)
    for seq_id, length in enumerate((4, 5, 3, 2)):
        add(scheduler, seq_id, length)
    assert step(scheduler) == (0, [(0, 0, 4), (1, 0, 5)])
    assert step(scheduler) == (0, [(2, 0, 3), (3, 0, 2)])
    assert step(scheduler) == (4, [(0, 4, 5), (1, 5, 6), (2, 3, 4), (3, 2, 3)])
    late = add(scheduler, 4, 6)
    scheduler.finish(scheduler.sequences[0], "abort")
    assert step(scheduler) == (0, [(4, 0, 6)]) and late.status is Status.RUNNING


# -- admission ------------------------------------------------------------------------------------


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    """First come, first served: a small request does not overtake a large one for ever."""
    scheduler = make(blocks=5, budget=100)
    add(scheduler, 0, 9)
    large, small = add(scheduler, 1, 12), add(scheduler, 2, 1)
    assert step(scheduler) == (0, [(0, 0, 9)])
    assert list(scheduler.waiting) == [large, small]


def test_seats_count_everybody_who_holds_blocks() -> None:
    scheduler = make(seats=2, budget=3)
    for seq_id in range(4):
        add(scheduler, seq_id, 5)
    seen = set()
    for _ in range(40):
        plan = scheduler.schedule()
        if plan is None:
            break
        holders = {seq.seq_id for seq in scheduler.sequences.values() if seq.block_table}
        assert len(holders) <= 2
        seen |= holders
        finish_step(scheduler, plan)
        if len(seen) < 4 and len(plan.rows) == 2:
            scheduler.finish(scheduler.sequences[plan.rows[0].seq_id], "abort")
    assert seen == {0, 1, 2, 3}


def test_draining_sequences_keep_their_seat() -> None:
    scheduler = make(seats=1)
    first = add(scheduler, 0, 3)
    add(scheduler, 1, 3)
    plan = scheduler.schedule()
    scheduler.finish(first, "abort")
    assert scheduler.schedule() is None and scheduler.draining == {0: first}
    finish_step(scheduler, plan)
    assert step(scheduler) == (0, [(1, 0, 3)])


def test_cached_tokens_cost_no_budget() -> None:
    scheduler = make(manager_class=PrefixCache, budget=10)
    add(scheduler, 0, [1] * 9)
    step(scheduler)
    seq = add(scheduler, 1, [1] * 9)
    add(scheduler, 2, [3] * 6)
    assert step(scheduler) == (1, [(0, 9, 10), (1, 8, 9), (2, 0, 6)])
    assert seq.num_cached_tokens == 8 == scheduler.num_cached_tokens


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "blocks", "max_model_len", "total", "reason"),
    [
        (3, 5, 20, 64, 8, None),
        (3, None, 20, 64, 64, None),
        (3, 100, 20, 64, 64, None),
        (3, 61, 20, 64, 64, None),
        (3, 62, 20, 64, 64, None),
        (3, None, 2, 64, 9, "kv_capacity"),  # 8 slots, and a last token that needs none
        (3, 6, 2, 64, 9, None),
        (3, 7, 2, 64, 9, "kv_capacity"),
        (3, None, 2, 9, 9, None),
        (3, None, 2, 10, 9, "kv_capacity"),
    ],
)
def test_most_tokens_of_a_sequence(
    prompt: int,
    max_tokens: int | None,
    blocks: int,
    max_model_len: int,
    total: int,
    reason: str | None,
) -> None:
    scheduler = make(blocks=blocks, max_model_len=max_model_len)
    seq = add(scheduler, 0, prompt, max_tokens=max_tokens)
    assert (seq.max_total, seq.limit_reason) == (total, reason)
    while scheduler.has_unfinished:
        step(scheduler)
    assert len(seq.token_ids) == total
    assert (seq.finish_reason, seq.stop_reason) == ("length", reason)
    assert scheduler.num_preemptions == 0 and scheduler.block_manager.num_used == 0


def test_ends_by_id() -> None:
    for token, ids, expected in (
        (0, [], ("stop", None)),
        (5, [5], ("stop", 5)),
        (0, [0], ("stop", None)),
        (5, [], ("length", None)),
    ):
        scheduler = make()
        seq = add(scheduler, 0, 3, max_tokens=3, stop_token_ids=ids)
        while scheduler.has_unfinished:
            step(scheduler, token)
        assert (seq.finish_reason, seq.stop_reason) == expected


def test_ignore_eos_and_explicit_stop_ids() -> None:
    scheduler = make()
    free = add(scheduler, 0, 3, max_tokens=3, ignore_eos=True)
    asked = add(scheduler, 1, 3, max_tokens=3, ignore_eos=True, stop_token_ids=[0])
    while scheduler.has_unfinished:
        step(scheduler, 0)
    assert len(free.completion_ids) == 3 and free.finish_reason == "length"
    assert asked.completion_ids == [0] and (asked.finish_reason, asked.stop_reason) == ("stop", 0)


# -- preemption -----------------------------------------------------------------------------------


def test_the_newest_gives_way_and_replays_all_it_had() -> None:
    scheduler = make(blocks=4, budget=16, manager_class=BlockManager)
    old, new = add(scheduler, 0, 7), add(scheduler, 1, 7)
    assert step(scheduler) == (0, [(0, 0, 7), (1, 0, 7)])
    assert step(scheduler) == (2, [(0, 7, 8), (1, 7, 8)])
    epoch = new.epoch
    assert step(scheduler) == (1, [(0, 8, 9)])  # needs a third block
    assert new.status is Status.WAITING and new.epoch == epoch + 1 and not new.block_table
    assert scheduler.num_preemptions == 1 and new.num_computed == 0
    assert len(new.completion_ids) == 2  # what it has said stays said
    scheduler.finish(old, "abort")
    plan = scheduler.schedule()
    assert shape(plan) == (0, [(1, 0, 9)]) and plan.rows[0].token_ids == [2] * 7 + [7, 7]
    assert plan.rows[0].sampling is not None and plan.rows[0].sampling.position == 9


def test_a_preempted_sequence_found_whole_in_the_cache_goes_on() -> None:
    """All but its newest token is cached when it comes back: it decodes in that very step."""
    scheduler = make(blocks=4, block_size=2, manager_class=PrefixCache)
    seq = add(scheduler, 0, 3)
    step(scheduler)
    step(scheduler)
    assert (len(seq.token_ids), seq.num_computed) == (5, 4)
    scheduler.preempt(seq)
    assert seq.status is Status.WAITING
    plan = scheduler.schedule()
    assert shape(plan)[1] == [(0, 4, 5)]
    finish_step(scheduler, plan)
    assert len(seq.token_ids) == 6


def test_blocks_on_their_way_are_waited_for() -> None:
    """At depth 1, a sequence that ends frees its blocks soon: nobody is preempted for them."""
    scheduler = make(blocks=3, block_size=4)
    old, ending = add(scheduler, 0, 4), add(scheduler, 1, 4, max_tokens=1)
    first = scheduler.schedule()
    assert shape(first)[1] == [(0, 0, 4), (1, 0, 4)]
    second = scheduler.schedule()
    assert shape(second)[1] == [(0, 4, 5)]  # took the third block
    finish_step(scheduler, first)
    assert ending.finished and scheduler.num_preemptions == 0
    for _ in range(20):
        third = scheduler.schedule()
        finish_step(scheduler, second)
        second = third
        if second is None:
            break
    assert scheduler.num_preemptions == 0 and old.finish_reason == "length"


# -- the counters of a sequence -------------------------------------------------------------------


def test_counters_over_an_overlapped_life() -> None:
    scheduler = make(budget=3)
    seq = add(scheduler, 0, 5, max_tokens=3)

    def counters() -> tuple[int, int, int, int]:
        return len(seq.token_ids), seq.num_pending, seq.num_computed, seq.steps_in_flight

    assert counters() == (5, 0, 0, 0) and seq.num_uncomputed == 5 and not seq.in_decode
    first = scheduler.schedule()
    assert counters() == (5, 0, 3, 1) and not seq.in_decode
    second = scheduler.schedule()
    assert counters() == (5, 1, 5, 2) and seq.in_decode and seq.num_tokens == 6
    finish_step(scheduler, first)
    assert counters() == (5, 1, 5, 1)
    third = scheduler.schedule()
    assert third.rows[0].token_ids == []  # being sampled by the step before
    assert counters() == (5, 2, 6, 2)
    finish_step(scheduler, second)
    assert counters() == (6, 1, 6, 1) and not seq.at_limit
    fourth = scheduler.schedule()
    assert counters() == (6, 2, 7, 2) and seq.at_limit
    assert scheduler.schedule() is None
    finish_step(scheduler, third)
    finish_step(scheduler, fourth)
    assert seq.finished and len(seq.completion_ids) == 3 and not scheduler.has_unfinished


def test_prompt_logprob_targets() -> None:
    """Every chunk carries the prompt tokens that follow its positions, and no generated one."""
    for budget in (1, 2, 3, 16):
        scheduler = make(budget=budget, seats=1, manager_class=PrefixCache)
        seq = add(scheduler, 0, [4, 5, 6, 7, 8], prompt_logprobs=2, max_tokens=3)
        found: list[int] = []
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            (row,) = plan.rows
            asked = row.prompt_logprobs
            if asked is not None:
                assert asked.count == 2 and row.start == len(found)
                found += asked.targets
            finish_step(scheduler, plan)
        assert found == [5, 6, 7, 8] and seq.finished


def test_row_sampling_is_a_copy_of_the_numbers() -> None:
    params = SamplingParams(temperature=1e-6, top_k=-1, top_p=0.5, min_p=0.1, logprobs=3)
    seq = Sequence(3, [1], params, sample_index=2, seed=99)
    row = seq.row_sampling(17)
    assert (row.temperature, row.top_k, row.top_p, row.min_p) == (0.0, 0, 0.5, 0.1)
    assert (row.seed, row.sample_index, row.position, row.logprobs) == (99, 2, 17, 3)


# -- ends in every place --------------------------------------------------------------------------


def test_finish_wherever_it_stands() -> None:
    scheduler = make(seats=2, manager_class=PrefixCache, budget=4)
    running, waiting = add(scheduler, 0, 9), add(scheduler, 1, 3)
    step(scheduler)
    leader = Sequence(2, [8] * 5, SamplingParams(n=2))
    follower = Sequence(3, [8] * 5, SamplingParams(n=2), sample_index=1, leader=leader)
    scheduler.add(leader)
    scheduler.add(follower)
    assert scheduler.parked == {2: [follower]} and follower not in scheduler.waiting
    for seq in (waiting, follower, running, leader):
        scheduler.finish(seq, "abort")
        scheduler.finish(seq, "stop", "again")  # a no-op
        assert (seq.finish_reason, seq.stop_reason) == ("abort", None)
        assert seq.seq_id not in scheduler.sequences
    assert not scheduler.has_unfinished and not scheduler.waiting
    assert scheduler.block_manager.num_used == 0


def test_followers_are_freed_by_a_leader_that_is_aborted() -> None:
    scheduler = make(manager_class=PrefixCache)
    leader = Sequence(0, [8] * 5, SamplingParams(n=2))
    follower = Sequence(1, [8] * 5, SamplingParams(n=2), sample_index=1, leader=leader)
    scheduler.add(leader)
    scheduler.add(follower)
    scheduler.finish(leader, "abort")
    assert list(scheduler.waiting) == [follower] and not scheduler.parked
    while scheduler.has_unfinished:
        step(scheduler)
    assert follower.finish_reason == "length"


@pytest.mark.parametrize("broken", [False, True])
def test_abort_all_in_any_state(broken: bool) -> None:
    scheduler = make(seats=3, manager_class=PrefixCache, budget=6, blocks=9)
    seqs = [add(scheduler, seq_id, 5) for seq_id in range(5)]
    plans = [scheduler.schedule()]
    finish_step(scheduler, plans.pop())
    scheduler.schedule()  # never read
    scheduler.preempt(seqs[0])
    scheduler.finish(seqs[1], "stop")
    if broken:
        scheduler.block_manager.free_blocks.popitem()  # as an interrupt could leave it
        seqs[2].block_table.append(0)
    scheduler.abort_all(broken)
    assert not scheduler.has_unfinished and not scheduler.draining and not scheduler.parked
    scheduler.block_manager.check([])
    assert all(seq.finished for seq in seqs) and seqs[1].finish_reason == "stop"
    add(scheduler, 9, 5, max_tokens=2)
    while scheduler.has_unfinished:
        step(scheduler)
