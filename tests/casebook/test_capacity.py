"""The pool, the context and the limits between them: K01 K03 K04 K07 K19 K39 K46."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casebook_tools import (
    G,
    assert_clean,
    drive,
    fake_token,
    ids,
    make_llm,
    make_scheduler,
    make_seq,
    run,
)
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.step_plan import StepPlan
from tiny_models import assert_greedy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
CACHING = pytest.mark.parametrize("caching", [True, False], ids=["cache", "plain"])


@DEPTHS
@CACHING
@pytest.mark.parametrize(("block_size", "num_blocks"), [(4, 2), (1, 7), (3, 3), (16, 1)])
def test_k01_one_sequence_outgrows_the_pool(
    block_size: int, num_blocks: int, caching: bool, depth: int
) -> None:
    capacity = block_size * num_blocks
    for prompt_len in range(1, capacity):
        scheduler = make_scheduler(num_blocks, block_size, caching)
        seq = make_seq(0, list(range(prompt_len)), G(50))
        scheduler.add(seq)
        steps = drive(scheduler, depth=depth, limit=200)
        assert (seq.finish_reason, seq.stop_reason) == ("length", "kv_capacity")
        # Every slot is used; the last token is reported and needs none.
        assert len(seq.completion_ids) == capacity + 1 - prompt_len
        assert steps <= capacity + 2
        assert scheduler.block_manager.num_used == 0 and scheduler.num_preemptions == 0


@DEPTHS
@CACHING
@pytest.mark.parametrize("count", [2, 3, 5])
def test_k01_several_sequences_each_outgrow_the_pool(count: int, caching: bool, depth: int) -> None:
    scheduler = make_scheduler(4, 4, caching)
    seqs = [make_seq(i, [i] * (1 + 2 * i), G(100)) for i in range(count)]
    for seq in seqs:
        scheduler.add(seq)
    drive(scheduler, depth=depth, limit=1000)
    for seq in seqs:
        assert (seq.finish_reason, seq.stop_reason) == ("length", "kv_capacity")
        assert len(seq.token_ids) == 17
        made = [fake_token(seq.seq_id, p) for p in range(seq.prompt_len, 17)]
        assert seq.completion_ids == made


@DEPTHS
@CACHING
def test_k01_generate_and_go_on(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], caching: bool, depth: int
) -> None:
    path = tiny_model()
    llm = make_llm(path, num_kvcache_blocks=2, enable_prefix_caching=caching, depth=depth)
    prompt = [7, 3, 5, 200, 11, 90]
    for prompts in ([prompt], [prompt, prompt[::-1], [4]]):
        outputs = run(llm, prompts, G(50))
        for output in outputs:
            sample = output.outputs[0]
            assert (sample.finish_reason, sample.stop_reason) == ("length", "kv_capacity")
            assert len(output.prompt_token_ids) + len(sample.token_ids) == 9
        assert_greedy(reference(path), prompts, ids(outputs))
    again = run(llm, [[5, 6]], G(3))
    assert ids(again) == [reference(path).greedy([5, 6], 3)]
    assert again[0].outputs[0].stop_reason is None


@DEPTHS
@CACHING
def test_k01_alone_again_after_preemption_with_everything_cached(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], caching: bool, depth: int
) -> None:
    # A sequence that gave up its blocks at a block boundary finds them all again once its
    # neighbour is gone: there is no prompt to compute, only its newest token.
    path = tiny_model()
    for first in range(1, 9):
        for second in range(1, 9):
            scheduler = make_scheduler(4, 4, caching)
            seqs = [make_seq(0, [1] * first, G(8)), make_seq(1, [2] * second, G(12))]
            for seq in seqs:
                scheduler.add(seq)
            drive(scheduler, depth=depth, limit=200)
            assert [len(seq.completion_ids) for seq in seqs] == [8, min(12, 17 - second)]
    llm = make_llm(path, num_kvcache_blocks=4, enable_prefix_caching=caching, depth=depth)
    prompts = [[9], [1, 2, 3, 4]]
    outputs = run(llm, prompts, [G(8), G(10)])
    assert llm.stats.preemptions > 0
    assert_greedy(reference(path), prompts, ids(outputs))


CAPS = [1, 2, 3, 4, 5, 8, 9, 16, 17]


@DEPTHS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kvcache_blocks": 7},
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 3, "num_kvcache_blocks": 6},
        {"num_kvcache_blocks": 6, "enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "num_kvcache_blocks": 7},
        {"max_num_seqs": 2},
    ],
    ids=lambda o: "-".join(f"{k[:9]}{v}" for k, v in o.items()) or "roomy",
)
def test_k03_exactly_max_tokens(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    options: dict[str, Any],
    depth: int,
) -> None:
    path = tiny_model()
    llm = make_llm(path, depth=depth, **options)
    outputs = run(llm, [[1, 2, 3]] * len(CAPS), [G(cap) for cap in CAPS])
    assert [len(tokens) for tokens in ids(outputs)] == CAPS
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert {output.outputs[0].stop_reason for output in outputs} == {None}
    assert_greedy(reference(path), [[1, 2, 3]] * len(CAPS), ids(outputs))
    assert llm.stats.generated_tokens == sum(CAPS)
    if "num_kvcache_blocks" in options:
        assert llm.stats.preemptions > 0


def test_k03_n_samples_and_streams_count_ids(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model(), num_kvcache_blocks=12)
    params = [G(5, n=3), G(7)]
    outputs = run(llm, [[1, 2, 3], [1, 2, 3, 4]], params)
    assert [[len(s.token_ids) for s in o.outputs] for o in outputs] == [[5] * 3, [7]]
    counts = {"0": 0, "1": 0}
    first = None
    for output in llm.stream([[1, 2, 3], [1, 2, 3, 4]], params):
        first = first or output.request_id
        key = "0" if output.request_id == first else "1"
        counts[key] += sum(len(sample.token_ids) for sample in output.outputs)
    assert counts == {"0": 15, "1": 7}
    assert_clean(llm)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "plain"])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 16])
def test_k04_prompt_longer_than_the_budget(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], budget: int, caching: bool
) -> None:
    path = tiny_model()
    prompt = [9, 8, 7] * 7
    for depth in (0, 1):
        llm = make_llm(
            path, max_num_batched_tokens=budget, enable_prefix_caching=caching, depth=depth
        )
        assert ids(run(llm, [prompt], G(5))) == [reference(path).greedy(prompt, 5)]
        steps = llm.stats.steps
        # Progress in every step, and the budget is used to the full while there is a prompt.
        assert all(0 < step.num_tokens <= budget for step in steps)
        assert len(steps) == -(-21 // budget) + 4
        prompts = [prompt, [5], [6] * 9, prompt[::-1]]
        outputs = run(llm, prompts, G(5))
        assert_greedy(reference(path), prompts, ids(outputs))
        assert all(step.num_tokens <= budget for step in llm.stats.steps)


def test_k04_without_chunking_a_small_budget_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=16.*max_model_len=64"):
        make_llm(
            tiny_model(), enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=64
        )
    llm = make_llm(
        tiny_model(), enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64
    )
    outputs = run(llm, [[3] * 63, [4] * 63, [5] * 2], G(1))
    assert [len(tokens) for tokens in ids(outputs)] == [1, 1, 1]
    assert all(step.num_tokens <= 64 for step in llm.stats.steps)


@DEPTHS
@pytest.mark.parametrize(("limit", "block_size"), [(16, 4), (17, 4), (15, 4), (16, 16), (13, 5)])
def test_k07_generation_stops_at_max_model_len(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    limit: int,
    block_size: int,
    depth: int,
) -> None:
    path = tiny_model()
    llm = make_llm(path, max_model_len=limit, kvcache_block_size=block_size, depth=depth)
    prompts = [[3] * 10, [3] * (limit - 1), [4], [5, 6]]
    for params in (G(100), G(None)):  # type: ignore[arg-type]
        outputs = run(llm, prompts, params)
        for prompt, output in zip(prompts, outputs):
            sample = output.outputs[0]
            # Prompt and completion together, the last token included, fill the limit exactly.
            assert len(prompt) + len(sample.token_ids) == limit
            assert (sample.finish_reason, sample.stop_reason) == ("length", None)
        assert_greedy(reference(path), prompts, ids(outputs))


def test_k07_limit_beyond_the_models_positions_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"max_model_len=513.*512"):
        make_llm(tiny_model(), max_model_len=513)


@DEPTHS
@CACHING
def test_k19_a_block_exactly_when_it_is_needed(caching: bool, depth: int) -> None:
    for prompt in range(1, 10):
        for count in range(1, 10):
            blocks = -(-(prompt + count) // 4)
            scheduler = make_scheduler(blocks, 4, caching)
            seq = make_seq(0, [1] * prompt, G(count))
            scheduler.add(seq)
            used: list[int] = []

            def look(plan: StepPlan, used: list[int] = used) -> None:
                used.append(len(plan.rows[0].block_table))
                assert used[-1] == -(-plan.rows[0].end // 4)

            drive(scheduler, look, depth=depth)
            assert scheduler.num_preemptions == 0
            assert len(seq.completion_ids) == count
            assert max(used) == -(-(prompt + count - 1) // 4)


@DEPTHS
@CACHING
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_k19_two_cross_a_boundary_with_one_free_block(
    block_size: int, caching: bool, depth: int
) -> None:
    for prompts in ((block_size, block_size), (block_size * 2, block_size)):
        blocks = sum(-(-p // block_size) for p in prompts) + 1
        scheduler = make_scheduler(blocks, block_size, caching)
        seqs = [make_seq(i, [i] * p, G(block_size + 1)) for i, p in enumerate(prompts)]
        for seq in seqs:
            scheduler.add(seq)
        drive(scheduler, depth=depth)
        for seq in seqs:
            expected = [fake_token(seq.seq_id, seq.prompt_len + i) for i in range(block_size + 1)]
            assert seq.completion_ids == expected


@CACHING
def test_k39_second_free_is_a_no_op(caching: bool) -> None:
    manager = (PrefixCache if caching else BlockManager)(8, 4)
    prefix = list(range(8))
    a, b = make_seq(0, [*prefix, 50], G(4)), make_seq(1, [*prefix, 60, 61], G(4))
    manager.allocate(a)
    manager.register(a, 9)
    assert manager.allocate(b) == (8 if caching else 0)
    manager.check([a, b])
    manager.free(a)
    manager.free(a)
    manager.check([a, b])
    manager.free(b)
    manager.free(b)
    manager.check([a, b])
    assert manager.num_free == 8 and len(set(manager.free_blocks)) == 8


@DEPTHS
@CACHING
@pytest.mark.parametrize("seed", range(3))
def test_k39_random_life(seed: int, caching: bool, depth: int) -> None:
    """Add, step, abort and finish in random order; every invariant after every operation."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        10,
        rng.choice([1, 3, 4]),
        caching,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([4, 9]),
    )
    capacity = scheduler.block_manager.num_blocks * scheduler.block_manager.block_size
    in_flight: list[StepPlan] = []
    everyone = []

    def read() -> None:
        plan = in_flight.pop(0)
        tokens = [None if r.sampling is None else fake_token(r.seq_id, r.end) for r in plan.rows]
        grown = scheduler.complete(plan, tokens)
        for seq in grown:
            if rng.random() < 0.05:
                scheduler.finish(seq, "stop", "text")  # a stop string; perhaps it had ended anyway

    for step in range(2500):
        kind = rng.random()
        live = list(scheduler.sequences.values())
        if kind < 0.2 and len(live) < 9:
            # Few distinct tokens, so that prefixes are often shared.
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, capacity - 1))]
            seq = make_seq(step, prompt, G(rng.randint(1, 30)))
            everyone.append(seq)
            scheduler.add(seq)
        elif kind < 0.25 and live:
            seq = rng.choice(live)
            scheduler.finish(seq, "abort")
            scheduler.finish(seq, "abort")
        elif kind < 0.27:
            scheduler.block_manager.reset()
        elif kind < 0.272:
            in_flight.clear()
            scheduler.abort_all()
            assert scheduler.block_manager.num_used == 0 and not scheduler.sequences
        else:
            plan = scheduler.schedule()
            assert plan is not None or in_flight or not scheduler.has_unfinished
            if plan is not None:
                in_flight.append(plan)
            if in_flight and (plan is None or len(in_flight) > depth):
                read()
        live = list(scheduler.sequences.values())
        scheduler.block_manager.check(live)
        assert sum(bool(seq.block_table) for seq in live) <= 4
        assert not any(seq.block_table for seq in everyone if seq.seq_id not in scheduler.sequences)
    while in_flight or scheduler.has_unfinished:
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        read()
    assert scheduler.block_manager.num_used == 0
    assert all(seq.finished for seq in everyone)
    for seq in everyone:
        if seq.finish_reason == "length":
            made = [fake_token(seq.seq_id, p) for p in range(seq.prompt_len, len(seq.token_ids))]
            assert seq.completion_ids == made


@DEPTHS
@CACHING
# The engine lowers max_num_seqs to the budget, so seats never exceed it.
@pytest.mark.parametrize(
    ("seats", "budget"), [(1, 64), (2, 64), (3, 64), (1, 5), (2, 5), (3, 5), (1, 2), (2, 2), (1, 1)]
)
def test_k46_seats_count_who_holds_blocks(
    seats: int, budget: int, caching: bool, depth: int
) -> None:
    scheduler = make_scheduler(40, 4, caching, max_num_seqs=seats, max_num_batched_tokens=budget)
    seqs = [make_seq(i, [i, 1, 2], G(6)) for i in range(20)]
    for seq in seqs:
        scheduler.add(seq)
    last_seen: dict[int, int] = {}
    step = 0

    def look(plan: StepPlan) -> None:
        nonlocal step
        step += 1
        assert sum(bool(seq.block_table) for seq in seqs) <= seats
        for row in plan.rows:
            last_seen[row.seq_id] = step
        for seq in scheduler.running.values():
            # A running sequence is in every step, but for those whose tokens are all in flight and
            # those behind whom the budget ran out.
            if seq.seq_id in last_seen and not seq.at_limit:
                assert step - last_seen[seq.seq_id] <= 3

    drive(scheduler, look, depth=depth)
    assert all(seq.finish_reason == "length" and len(seq.completion_ids) == 6 for seq in seqs)
    assert scheduler.block_manager.num_used == 0


def test_k46_in_the_engine_with_n_samples(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model(), max_num_seqs=2)
    outputs = run(llm, [[1, 2, 3, 4, 5]] * 4, G(6, n=3))
    assert all(len(sample.token_ids) == 6 for output in outputs for sample in output.outputs)
    assert max(step.num_rows for step in llm.stats.steps) == 2
    assert max(step.blocks_in_use for step in llm.stats.steps) <= 2 * 3
