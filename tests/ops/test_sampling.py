"""The sampler at its edges, and rows that do not feel each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from minivllm.engine.step_plan import RowSampling
from minivllm.ops.sampling import SamplingBatch, sample, scale, scores

DEFAULTS = RowSampling(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample_index=0, position=0
)


def row(**changes):
    return replace(DEFAULTS, **changes)


def batch(*rows):
    return SamplingBatch.from_rows(list(rows))


def random_rows(rng, count):
    """Rows of every kind: greedy, plain, filtered, with few and with many survivors."""
    return [
        row(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 1, 5, 200]),
            top_p=rng.choice([1.0, 1.0, 0.5, 0.95]),
            min_p=rng.choice([0.0, 0.0, 0.1]),
            seed=rng.getrandbits(64),
            sample_index=rng.randrange(3),
            position=rng.randrange(1000),
        )
        for _ in range(count)
    ]


# Rows and their batch ---------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [63, 1024])
def test_k09_rows_do_not_depend_on_batch_mates_or_order(vocab):
    rng = random.Random(vocab)
    torch.manual_seed(0)
    rows = random_rows(rng, 60)
    logits = torch.randn(60, vocab) * 3
    whole = sample(logits, batch(*rows))
    for i in range(60):
        assert sample(logits[i : i + 1], batch(rows[i])).item() == whole[i]
    order = torch.randperm(60)
    assert torch.equal(sample(logits[order], batch(*(rows[i] for i in order))), whole[order])
    for some in (slice(0, 7), slice(20, 60, 3)):
        assert torch.equal(sample(logits[some], batch(*rows[some])), whole[some])


def test_k09_global_generator_is_untouched():
    before = torch.random.get_rng_state()
    sample(torch.zeros(3, 50), batch(row(), row(top_k=5), row(temperature=0.0)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_k09_same_numbers_draw_the_same_token_and_others_do_not():
    logits = torch.zeros(1, 4096)
    first = sample(logits, batch(row(seed=42, position=3)))
    assert torch.equal(first, sample(logits, batch(row(seed=42, position=3))))
    others = [row(seed=43, position=3), row(seed=42, position=4), row(seed=42, sample_index=1)]
    assert len({int(sample(logits, batch(other))) for other in [row(seed=42), *others]}) == 4


def test_seeds_count_modulo_2_to_the_64():
    logits = torch.zeros(1, 4096)

    def token(seed):
        return int(sample(logits, batch(row(seed=seed))))

    assert token(5) == token(5 + 2**64) == token(5 - 2**64)
    assert token(-1) == token(2**64 - 1)
    # All 64 bits matter: the upper half is a key word of its own.
    assert len({token(5 + high) for high in (0, 2**32, 2**62, 2**63)}) == 4
    assert batch(row(seed=2**63)).seed.tolist() == [-(2**63)]


def test_k45_mixed_greedy_and_random_rows():
    torch.manual_seed(0)
    logits = torch.randn(3, 320)
    random_row = row(seed=1, position=9)
    got = sample(logits, batch(row(temperature=0.0), random_row, row(temperature=0.0)))
    assert got[0] == logits[0].argmax()
    assert got[2] == logits[2].argmax()
    # Greedy mates use up none of its randomness.
    assert got[1] == sample(logits[1:2], batch(random_row))


def test_k45_greedy_tie_goes_to_the_lowest_id():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Long rows, so that a vectorised argmax meets the tie in different lanes and chunks.
        logits = torch.zeros(4, 5000, dtype=dtype)
        for i, places in enumerate([(17, 4000), (4998, 4999), (0, 2500), (63, 64)]):
            logits[i, list(places)] = 3
        assert sample(logits, batch(*[row(temperature=0.0)] * 4)).tolist() == [17, 4998, 0, 63]
        mixed = batch(row(), *[row(temperature=0.0)] * 3)
        assert sample(logits, mixed).tolist()[1:] == [4998, 0, 63]


def test_k45_rows_of_minus_infinity_except_one():
    logits = torch.full((6, 320), -math.inf)
    logits[:, 123] = -7.0
    rows = [row(temperature=0.0), row(), row(top_k=50), row(top_p=0.9), row(min_p=0.1)]
    assert sample(logits, batch(*rows, row(temperature=1e30))).tolist() == [123] * 6


def test_degenerate_rows_still_give_valid_ids():
    logits = torch.zeros(3, 8)
    logits[0], logits[1, 5], logits[2, 3] = -math.inf, math.inf, math.nan
    for kind in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        token_ids = sample(logits, batch(*[row(**kind)] * 3))
        assert ((token_ids >= 0) & (token_ids < 8)).all()
    assert sample(logits[1:2], batch(row())).item() == 5


# Filters at their edges -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1e-3, 1e-7, 1e-9, 1e-30, 1e-60, 0.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_k56_tiny_top_p_is_greedy(dtype, top_p, top_k):
    torch.manual_seed(0)
    logits = torch.randn(200, 320).to(dtype)
    rows = [row(top_p=top_p, top_k=top_k, position=i) for i in range(200)]
    assert torch.equal(sample(logits, batch(*rows)), logits.argmax(dim=-1))
    if top_p < 1 / 4096:
        flat = torch.zeros(20, 4096, dtype=dtype)
        assert sample(flat, batch(*rows[:20])).tolist() == [0] * 20


def test_k56_top_p_one_is_off():
    torch.manual_seed(0)
    logits = torch.randn(100, 320)
    plain = sample(logits, batch(*(row(position=i) for i in range(100))))
    with_mate = batch(*(row(position=i) for i in range(100)), row(top_p=0.5))
    # A filtering batch mate sends all rows through the filters: theirs change nothing.
    assert torch.equal(sample(torch.cat([logits, logits[:1]]), with_mate)[:100], plain)


def test_k58_top_k_at_and_beyond_the_vocabulary():
    torch.manual_seed(0)
    logits = torch.randn(100, 320)

    def run(**changes):
        return sample(logits, batch(*(row(position=i, **changes) for i in range(100))))

    plain = run()
    for top_k in (0, -1, 320, 321, 10**6, 2**40):
        assert torch.equal(run(top_k=top_k), plain)
    assert ((run(top_k=319) >= 0) & (run(top_k=319) < 320)).all()
    assert torch.equal(run(top_k=1, temperature=5.0), logits.argmax(dim=-1))
    ties = (logits * 2).round()
    rows = [row(position=i, top_k=1, temperature=5.0) for i in range(100)]
    assert torch.equal(sample(ties, batch(*rows)), ties.argmax(dim=-1))


def test_k58_mixed_batch_keeps_each_rows_own_k():
    torch.manual_seed(0)
    logits = torch.randn(1, 320).expand(3, -1)
    seen = [set(), set(), set()]
    for i in range(400):
        rows = [row(top_k=k, position=i, temperature=3.0) for k in (1, 325, 4)]
        for got, token in zip(seen, sample(logits, batch(*rows)).tolist(), strict=True):
            got.add(token)
    best = logits[0].topk(4).indices.tolist()
    assert seen[0] == {best[0]}
    assert len(seen[1]) > 100
    assert seen[2] == set(best)


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-5, 9.9999999e-6, 1e-6, 1e-9, 1e-30, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_k67_tiny_temperature_tends_to_greedy(temperature, dtype):
    torch.manual_seed(0)
    logits = (torch.rand(50, 320) * 2e4 - 1e4).to(dtype)
    # Gaps of at least 8 (float16's step up there), or noise may at 1e-2 rightly decide a tie.
    logits[torch.arange(50), torch.randint(0, 320, (50,))] = 10_008
    for kind in ({}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.1}):
        rows = [row(temperature=temperature, position=i, **kind) for i in range(50)]
        assert torch.equal(sample(logits, batch(*rows)), logits.argmax(dim=-1))


def test_k67_float16_logits_are_scaled_in_float32():
    logits = torch.tensor([[6e4, 6e4 - 32, -6e4]], dtype=torch.float16)
    # The gap of -6e4 - 6e4 is beyond float16.
    assert scale(logits, torch.tensor([2.0])).tolist() == [[0.0, -16.0, -60000.0]]


# Forms that must agree --------------------------------------------------------------------------


def test_noise_by_id_equals_noise_by_row():
    torch.manual_seed(0)
    logits = torch.randn(8, 1003) * 3
    few = [row(seed=i, top_k=40, position=5) for i in range(8)]
    plain = [replace(sampling, top_k=0) for sampling in few]
    sparse, dense = scores(logits, batch(*few)), scores(logits, batch(*plain))
    kept = sparse > -math.inf
    assert kept.sum(dim=-1).tolist() == [40] * 8
    # A logarithm may round otherwise in a vector's tail: last bits, not other noise.
    assert torch.allclose(sparse[kept], dense[kept], atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_the_vocabulary_find_the_winner(ranks):
    torch.manual_seed(0)
    logits = torch.randn(40, 301) * 3
    rows = batch(*(row(seed=i, temperature=0.7) for i in range(40)))
    bounds = [301 * i // ranks for i in range(ranks + 1)]
    best = logits.amax(dim=-1)
    found = []
    for start, end in pairwise(bounds):
        shard = logits[:, start:end]
        token_ids = sample(shard, rows, vocab_start=start)
        # A shard's scores are relative to its own largest logit.
        own = scores(shard, rows, start).amax(dim=-1) + (shard.amax(dim=-1) - best) / 0.7
        found.append((own, token_ids))
    winner = torch.stack([own for own, _ in found]).argmax(dim=0)
    token_ids = torch.stack([ids for _, ids in found]).gather(0, winner[None])[0]
    assert torch.equal(token_ids, sample(logits, rows))


def test_greedy_shard_returns_ids_of_the_whole_vocabulary():
    greedy = batch(row(temperature=0.0))
    assert sample(torch.tensor([[0.0, 1.0]]), greedy, vocab_start=100).tolist() == [101]
    mixed = batch(row(temperature=0.0), row())
    logits = torch.tensor([[0.0, 1.0], [-math.inf, 0.0]])
    assert sample(logits, mixed, vocab_start=100).tolist() == [101, 101]


def test_filters_on_a_shard_are_refused():
    with pytest.raises(ValueError, match="vocab_start=8"):
        sample(torch.zeros(1, 8), batch(row(top_k=2)), vocab_start=8)


def test_flags_are_those_of_rows_that_draw():
    assert batch(row(temperature=0.0, top_k=5)).all_greedy
    assert not batch(row(temperature=0.0, top_k=5), row()).any_filter
    for kind in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert batch(row(temperature=0.0), row(**kind)).any_filter
    packed = batch(row(top_k=-1), row(temperature=1e-6))
    assert packed.top_k.tolist() == [0, 0]
    assert packed.temperature.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.0}, {"top_k": 5, "min_p": 0.1}])
def test_logits_are_unchanged(kind):
    torch.manual_seed(0)
    logits = torch.randn(3, 100)
    before = logits.clone()
    sample(logits, batch(row(**kind), row(**kind), row()))
    assert torch.equal(logits, before)


def test_no_rows():
    assert sample(torch.zeros(0, 10), batch()).shape == (0,)
    some = replace(batch(row(top_k=2)).select(torch.arange(0)))
    assert sample(torch.zeros(0, 10), some).shape == (0,)
