"""Seeded random workloads through the whole engine loop: depth changes nothing but the moment.

Every run checks the invariants of `harness.check` after each step and the content of every block
that a row reads, and must end within a number of steps that follows from its tokens.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness import Setup, make_setup, random_request

SEEDS = range(150)


def random_options(rng: random.Random) -> dict[str, Any]:
    """Engine options that leave little room: small pools, small budgets, few seats."""
    seats = rng.randrange(1, 6)
    return {
        "num_blocks": rng.randrange(3, 14),
        "block_size": rng.choice((1, 2, 3, 4)),
        "max_num_seqs": seats,
        "budget": seats + rng.randrange(0, 20),
        "max_model_len": rng.randrange(10, 40),
        "prefix_cache": rng.random() < 0.7,
        "chunked": rng.random() < 0.75,
        "eos_every": rng.choice((0, 4, 9)),
    }


def run_workload(seed: int, depth: int, late: bool, aborts: bool = False) -> Setup:
    """One random workload: requests come before and between the steps."""
    rng = random.Random(seed)
    options = random_options(rng)
    setup = make_setup(**options, depth=depth, late=late)
    longest = min(options["num_blocks"] * options["block_size"], options["max_model_len"]) - 1
    requests = [random_request(rng, longest) for _ in range(rng.randrange(1, 10))]
    early = rng.randrange(1, len(requests) + 1)
    tokens = 0
    for number, (prompt, params, sampling_seed) in enumerate(requests):
        seqs = setup.add(str(number), prompt, params, sampling_seed)
        tokens += sum(seq.max_total + 2 for seq in seqs)
        if number >= early:
            setup.step()
        if aborts and rng.random() < 0.3 and setup.engine.requests:
            setup.engine.abort(rng.choice(sorted(setup.engine.requests)))
            setup.check()
    setup.run(bound=10 + (depth + 1) * tokens)
    return setup


def summary(setup: Setup) -> dict[str, Any]:
    """What a user gets of each request."""
    return {
        name: (
            output.prompt_logprobs,
            [
                (o.token_ids, o.finish_reason, o.stop_reason, o.logprobs, o.cumulative_logprob)
                for o in output.outputs
            ],
        )
        for name, output in setup.outputs.items()
    }


def test_depth_changes_no_output() -> None:
    steps = hits = preemptions = 0
    for seed in SEEDS:
        results = []
        for depth, late in ((0, True), (1, True), (1, False)):
            setup = run_workload(seed, depth, late)
            results.append(summary(setup))
            steps += setup.steps
            hits += setup.device.hits_checked
            preemptions += setup.engine.stats.preemptions
            assert setup.runner.max_in_flight <= depth + 1
        assert results[0] == results[1] == results[2], seed
    print(f"{steps} steps, {hits} cache hits, {preemptions} preemptions")
    assert steps > 8_000 and hits > 500 and preemptions > 200


def test_options_change_no_output() -> None:
    """The same requests under other block sizes, budgets, seats and pools give the same tokens."""
    for seed in range(60):
        rng = random.Random(seed)
        requests = [random_request(rng, 10) for _ in range(5)]
        results = []
        for depth in (0, 1):
            for _ in range(3):
                options = {**random_options(rng), "max_model_len": 24, "eos_every": 7}
                needed = -(-24 // options["block_size"])  # one sequence always fits whole
                options["num_blocks"] = needed + rng.randrange(0, 4)
                setup = make_setup(**options, depth=depth)
                for number, (prompt, params, sampling_seed) in enumerate(requests):
                    setup.add(str(number), prompt, params, sampling_seed)
                setup.run()
                results.append(summary(setup))
        assert all(result == results[0] for result in results[1:]), seed


@pytest.mark.parametrize("depth", [0, 1])
def test_aborts_at_any_moment(depth: int) -> None:
    for seed in SEEDS:
        run_workload(seed, depth, late=seed % 2 == 0, aborts=True)


@pytest.mark.parametrize("depth", [0, 1])
def test_more_requests_than_seats(depth: int) -> None:
    """Case K46: all end, none is left undecoded for long, and never more than two hold blocks."""
    for budget in (2, 3, 16):
        setup = make_setup(num_blocks=40, max_num_seqs=2, budget=budget, depth=depth)
        rng = random.Random(budget)
        _, params, _ = random_request(rng, 9)
        params.n, params.max_tokens, params.ignore_eos = 1, 6, True
        params.stop_token_ids = []
        for number in range(20):
            setup.add(str(number), [rng.randrange(1, 7) for _ in range(3)], params, number)
        idle: dict[int, int] = {}
        while setup.engine.has_unfinished:
            before = {seq.seq_id: seq.num_computed for seq in setup.scheduler.running.values()}
            setup.step()
            for seq_id, computed in before.items():
                seq = setup.scheduler.running.get(seq_id)
                stuck = seq is not None and seq.num_computed == computed and not seq.at_limit
                idle[seq_id] = idle.get(seq_id, 0) + 1 if stuck else 0
                assert idle[seq_id] <= 3
        setup.check_empty()
        assert all(len(out.outputs[0].token_ids) == 6 for out in setup.outputs.values())
        assert len(setup.outputs) == 20
