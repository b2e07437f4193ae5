"""One history, many ways to compute it: K24 K30 K40 K55."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from casebook_tools import (
    SP,
    G,
    drive,
    fake_token,
    ids,
    make_llm,
    make_scheduler,
    make_seq,
    prepared,
    record_logits,
    run,
)
from minivllm.engine.prefix_cache import PrefixCache, block_hash
from minivllm.engine.step_plan import StepPlan
from tiny_models import assert_greedy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


# -- K24: what a worker would get -----------------------------------------------------------------


def plans_of_every_state(block_size: int) -> list[StepPlan]:
    """Plans with rows that are new, half prefilled, cached, decoding, preempted and resumed."""
    scheduler = make_scheduler(
        -(-64 // block_size), block_size, max_num_seqs=4, max_num_batched_tokens=7
    )
    prefix = list(range(100, 118))
    params = [
        G(18),
        SP(temperature=0.7, seed=2**64 - 1, top_k=5, top_p=0.9, min_p=0.1, max_tokens=18),
        G(20, logprobs=3),
        G(16, prompt_logprobs=2),
        G(9),
    ]
    tails = [[1, 2, 3], [4] * 9, [5], [6, 7], [8, 9]]
    for i, (param, tail) in enumerate(zip(params, tails)):
        scheduler.add(make_seq(i, prefix + tail, param))
    plans: list[StepPlan] = []
    drive(scheduler, plans.append, depth=1)
    assert scheduler.num_preemptions > 0 and scheduler.num_cached_tokens > 0
    rows = [row for plan in plans for row in plan.rows]
    assert any(row.epoch > 0 and row.start == 0 for row in rows) or any(
        row.epoch > 0 and row.num_tokens > 1 for row in rows
    )
    assert any(row.sampling is None for row in rows), "no unfinished chunk"
    assert any(len(row.token_ids) < row.num_tokens for row in rows), "no token in flight"
    assert any(row.prompt_logprobs is not None for row in rows)
    return plans


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_k24_a_plan_survives_the_wire(block_size: int) -> None:
    for plan in plans_of_every_state(block_size):
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            copy = pickle.loads(pickle.dumps(plan, protocol))
            assert copy == plan and copy is not plan
            assert prepared(copy, block_size) == prepared(plan, block_size)


def test_k24_a_plan_carries_what_its_step_needs_and_no_more() -> None:
    for plan in plans_of_every_state(4):
        for row in plan.rows:
            # The tokens to run, or one less where the last is still being sampled.
            assert row.num_tokens - len(row.token_ids) in (0, 1)
            assert len(row.block_table) >= -(-row.end // 4)
        for row in plan.rows[: plan.num_decode]:
            assert row.num_tokens == 1 and len(row.token_ids) <= 1
    # A long history does not travel: decode rows of long sequences weigh as little as short ones'.
    scheduler = make_scheduler(600, 4, max_num_batched_tokens=1024, max_model_len=4096)
    scheduler.add(make_seq(0, list(range(2000)), G(40)))
    plans: list[StepPlan] = []
    drive(scheduler, plans.append)
    assert len(pickle.dumps(replace(plans[-1].rows[0], block_table=[]))) < 600


CHILD = """
import pickle, sys
from casebook_tools import prepared
size, plans = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps([prepared(plan, size) for plan in plans]))
"""


def test_k24_in_another_process_with_another_block_size() -> None:
    # No class attribute or module state stands in for the block size: the child is told it here.
    plans = plans_of_every_state(5)
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((5, plans)),
        capture_output=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
    )
    assert child.returncode == 0, child.stderr.decode()
    assert pickle.loads(child.stdout) == [prepared(plan, 5) for plan in plans]


@DEPTHS
def test_k24_the_engine_runs_on_pickled_plans(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    path = tiny_model()
    llm = make_llm(
        path, num_kvcache_blocks=9, max_num_batched_tokens=6, max_num_seqs=4, depth=depth
    )
    runner: Any = llm.engine.runner
    launch = runner.launch
    runner.launch = lambda plan: launch(pickle.loads(pickle.dumps(plan)))
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [9], [1, 2, 3, 4, 5, 8, 8, 8, 8]]
    outputs = run(llm, prompts, G(14))
    assert llm.stats.preemptions > 0
    assert_greedy(reference(path), prompts, ids(outputs))


# -- K30: reuse -----------------------------------------------------------------------------------


def check_index(manager: PrefixCache, known: dict[int, tuple[int, ...]] | None = None) -> None:
    """Every entry's hash is that of its tokens over its parent's chain, where that is known."""
    by_identity = {content.identity: content for content in manager.cached.values()}
    for digest, block in manager.index.items():
        content = manager.cached[block]
        assert content.hash == digest and len(content.tokens) == manager.block_size
        if content.parent == 0:
            assert block_hash(content.tokens, 0) == digest
        elif content.parent in by_identity:
            assert block_hash(content.tokens, by_identity[content.parent].hash) == digest


@DEPTHS
def test_k30_a_reused_block_is_not_found_under_its_old_name(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    path = tiny_model()
    llm = make_llm(path, num_kvcache_blocks=4, depth=depth)
    manager: Any = llm.engine.scheduler.block_manager
    a, b = [1] * 8 + [2], [3] * 13
    assert ids(run(llm, [a], G(2))) == [reference(path).greedy(a, 2)]
    again = run(llm, [a], G(2))
    assert again[0].num_cached_tokens == 8
    assert ids(again) == [reference(path).greedy(a, 2)]
    assert ids(run(llm, [b], G(3))) == [reference(path).greedy(b, 3)]
    check_index(manager)
    outputs = run(llm, [a], G(2))
    assert ids(outputs) == [reference(path).greedy(a, 2)]
    assert outputs[0].num_cached_tokens == 0
    check_index(manager)


@DEPTHS
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_k30_content_of_every_found_block(block_size: int, depth: int) -> None:
    """A model of the cache's content beside the engine: a hit must be on what is really there."""
    import random

    rng = random.Random(block_size)
    scheduler = make_scheduler(
        24 // block_size, block_size, max_num_seqs=3, max_num_batched_tokens=5
    )
    manager: Any = scheduler.block_manager
    # Slot -> the whole history up to the token whose K and V stand there.
    memory: dict[int, tuple[int, ...]] = {}
    histories: dict[int, list[int]] = {}

    def write(plan: StepPlan) -> None:
        for row in plan.rows:
            history = histories[row.seq_id]
            while len(history) < row.end:
                history.append(fake_token(row.seq_id, len(history)))
            for position in range(row.end):
                block = row.block_table[position // block_size]
                slot = block * block_size + position % block_size
                if position >= row.start:
                    memory[slot] = tuple(history[: position + 1])
                # Reads: shared or own, every earlier slot holds exactly this sequence's history.
                assert memory[slot] == tuple(history[: position + 1])
        check_index(manager)

    for seq_id in range(150):
        if len(scheduler.sequences) >= 5 or rng.random() < 0.3:
            drive(scheduler, write, depth=depth)
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        if rng.random() < 0.3 and histories:  # another one's text, generated tokens included
            prompt = rng.choice(list(histories.values()))[: rng.randint(1, 20)]
        histories[seq_id] = list(prompt)
        scheduler.add(make_seq(seq_id, prompt, G(rng.randint(1, 9))))
    drive(scheduler, write, depth=depth)
    assert scheduler.num_cached_tokens > 50


def test_k30_a_colliding_hash_costs_a_miss_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # All blocks get one of two hashes: look-ups must still never return other content.
    monkeypatch.setattr(
        "minivllm.engine.prefix_cache.block_hash", lambda tokens, parent: 1 + sum(tokens) % 2
    )
    import random

    rng = random.Random(0)
    manager = PrefixCache(12, 2)
    content: dict[int, tuple[int, ...]] = {}
    live = []
    for i in range(400):
        seq = make_seq(i, [rng.randrange(3) for _ in range(rng.randint(1, 8))], G(4))
        if manager.can_allocate(seq):
            cached = manager.allocate(seq)
            for b in range(cached // 2):
                assert content[seq.block_table[b]] == tuple(seq.token_ids[: 2 * b + 2])
            for b in range(cached // 2, len(seq.token_ids) // 2):
                content[seq.block_table[b]] = tuple(seq.token_ids[: 2 * b + 2])
            manager.register(seq, len(seq.token_ids))
            live.append(seq)
        if live and rng.random() < 0.5:
            manager.free(live.pop(rng.randrange(len(live))))
        manager.check(live)


# -- K40: a hit is a miss, but faster -------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_k40_hits_change_nothing(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    family: str,
    block_size: int,
    depth: int,
) -> None:
    path = tiny_model(family)
    truth = reference(path)
    p = list(range(1, 12))
    prompts = [p, p, [*p[:8], 50, 51]]
    for options in ({}, {"max_num_batched_tokens": 5, "max_num_seqs": 2}, {"max_num_seqs": 1}):
        llm = make_llm(
            path, kvcache_block_size=block_size, num_kvcache_blocks=200, depth=depth, **options
        )
        # Concurrent duplicates in one call, then a repeat, then longer texts that go on from here.
        for _ in range(2):
            assert_greedy(truth, prompts, ids(run(llm, prompts, G(8))))
        answer = truth.greedy(p, 8)
        longer = [p + answer, p + answer[:5] + [7], p + answer + [3, 4]]
        outputs = run(llm, longer, G(4))
        assert_greedy(truth, longer, ids(outputs))
        full = (len(p) + 7) // block_size * block_size  # the last token is never stored
        assert outputs[0].num_cached_tokens == full
        again = run(llm, [p], G(1))[0]
        assert again.num_cached_tokens == (len(p) - 1) // block_size * block_size
        llm.reset_prefix_cache()
        assert run(llm, [p], G(1))[0].num_cached_tokens == 0


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("length", [4, 5, 8, 9, 17, 33])
def test_k40_logits_of_a_hit_equal_those_of_a_miss(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], length: int, backend: str
) -> None:
    prompt = [(7 * i * i + 3) % 320 for i in range(length)]
    llm = make_llm(tiny_model(), attention_backend=backend)
    seen = record_logits(llm)
    miss, hit = (run(llm, [prompt], G(1))[0] for _ in range(2))
    assert miss.num_cached_tokens == 0 and hit.num_cached_tokens == (length - 1) // 4 * 4
    tail = [*prompt[: length // 2], 9, 8, 7]
    run(llm, [tail], G(1))
    torch.testing.assert_close(seen[0], seen[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(
        seen[1][0], reference(tiny_model()).logits(prompt)[-1], atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        seen[2][0], reference(tiny_model()).logits(tail)[-1], atol=1e-4, rtol=1e-4
    )


def test_k40_equal_blocks_behind_different_beginnings_are_not_shared(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    llm = make_llm(tiny_model())
    same = [5, 6, 7, 8]
    prompts = [[1, 2, 3, 4, *same, 9], [4, 3, 2, 1, *same, 9], [*same, *same, 9], [*same, 9]]
    for order in (prompts, prompts[::-1]):
        llm.reset_prefix_cache()
        cached = []
        for prompt in order:
            outputs = run(llm, [prompt], G(5))
            cached.append(outputs[0].num_cached_tokens)
            assert_greedy(reference(tiny_model()), [prompt], ids(outputs))
        assert sum(cached) == 4  # of the two that begin with `same`, the second finds one block


def test_k40_samples_of_one_prompt_share_it(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    llm = make_llm(tiny_model())
    prompt = list(range(20, 41))
    output = run(llm, [prompt], G(6, n=4))[0]
    assert [s.token_ids for s in output.outputs] == [reference(tiny_model()).greedy(prompt, 6)] * 4
    # 21 tokens once, then 21 - 20 for each of the others, and 5 decode steps each.
    assert llm.stats.tokens_computed == 21 + 3 * 1 + 4 * 5
    assert llm.stats.cached_tokens == 3 * 20


# -- K55: positions -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_k55_decode_equals_prefill_on_any_history(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], family: str, backend: str
) -> None:
    path = tiny_model(family)
    history = [17, 3, 250, 9, 9, 311, 42, 5, 128, 77, 6, 1]
    truth = reference(path).logits(history)  # [12, V]

    def forced(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.tensor([history[position] for position in batch.position.tolist()])

    for size in (1, 3, 4, 16):
        llm = make_llm(
            path,
            kvcache_block_size=size,
            attention_backend=backend,
            enable_prefix_caching=False,
            parts={"sample": forced},
        )
        seen = record_logits(llm)
        for first in (1, 2, 5):
            seen.clear()
            run(llm, [history[:first]], G(len(history) - first))
            steps = torch.cat(seen)  # logits after first, first + 1, ... tokens
            torch.testing.assert_close(steps, truth[first - 1 : -1], atol=1e-4, rtol=1e-4)
        for length in range(1, 12):
            seen.clear()
            run(llm, [history[:length]], G(1))
            torch.testing.assert_close(seen[0][0], truth[length - 1], atol=1e-4, rtol=1e-4)


@DEPTHS
def test_k55_black_box(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    path = tiny_model()
    llm = make_llm(path, depth=depth)
    prompt = [30, 20, 10]
    expected = reference(path).greedy(prompt, 8)
    for count in range(1, 9):
        assert ids(run(llm, [prompt], G(count))) == [expected[:count]]
    for cut in range(8):
        assert ids(run(llm, [prompt + expected[:cut]], G(1))) == [expected[cut : cut + 1]]


def test_k55_the_last_positions_of_the_context(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    path = tiny_model(max_position_embeddings=24)
    llm = make_llm(path)
    prompts = [[(5 * i) % 300 for i in range(n)] for n in (22, 23, 3)]
    outputs = run(llm, prompts, G(100))
    assert [len(text) for text in ids(outputs)] == [2, 1, 21]
    assert_greedy(reference(path), prompts, ids(outputs))
