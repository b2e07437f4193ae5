"""Draws against exact probabilities: Pearson's chi-square test, and proof that it can fail.

Every case has one fixed seed, so that its outcome is a constant: nothing here is flaky.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from minivllm.engine.step_plan import RowSampling
from minivllm.ops.philox import uniform
from minivllm.ops.sampling import SamplingBatch, draw, sample, token_probs

DEFAULTS = RowSampling(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample_index=0, position=0
)


def row(**changes):
    return replace(DEFAULTS, **changes)


def batch(*rows):
    return SamplingBatch.from_rows(list(rows))


def p_value(token_ids, probs):
    """Chance of counts at least this far from `probs` if they were drawn from it."""
    counts = torch.bincount(token_ids, minlength=len(probs)).double()
    expected = probs.double() * len(token_ids)
    if counts[probs == 0].sum() > 0:
        return 0.0
    # Cells of fewer than five expected counts are pooled, as the test's approximation demands.
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    live = expected > 0
    chi2 = ((counts - expected)[live].square() / expected[live]).sum()
    freedom = torch.tensor(max(int(live.sum()) - 1, 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, chi2 / 2).item()


def exact(logits, sampling):
    """The row's distribution: `token_probs`, and min-p by its definition."""
    probs = token_probs(
        logits[None],
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p]),
    )[0].double()
    probs = probs.where(probs >= sampling.min_p * probs.max(), 0)
    return probs / probs.sum()


def many(logits, sampling, count, axis="position"):
    """`count` draws of one row at successive positions, seeds or sample indices."""
    rows = [replace(sampling, **{axis: i}) for i in range(count)]
    return sample(logits.expand(count, -1), batch(*rows))


# One choice of seed in 10,000 would refuse a right sampler at PASS; wrong ones fall below FAIL.
PASS, FAIL = 1e-4, 1e-12
CASES = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k_top_p": {"top_k": 12, "top_p": 0.7, "temperature": 1.5},
    "top_k_min_p": {"top_k": 9, "min_p": 0.2, "temperature": 2.0},
    "top_p_min_p": {"top_p": 0.95, "min_p": 0.05},
    "all": {"top_k": 15, "top_p": 0.9, "min_p": 0.03, "temperature": 1.3},
}


@pytest.mark.parametrize("vocab", [30, 203])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(case, vocab):
    torch.manual_seed(7)
    logits = torch.randn(vocab) * 1.5
    sampling = row(seed=vocab, **CASES[case])
    token_ids = many(logits, sampling, 20_000)
    assert p_value(token_ids, exact(logits, sampling)) > PASS


@pytest.mark.parametrize("axis", ["position", "seed", "sample_index"])
def test_draws_are_independent_along_each_coordinate(axis):
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 0.2])
    token_ids = many(logits, row(), 30_001, axis)
    probs = logits.double().softmax(dim=-1)
    assert p_value(token_ids, probs) > PASS
    # Neighbours: a pair of draws is one draw from the product distribution.
    pairs = token_ids[0:-1:2] * 5 + token_ids[1::2]
    assert p_value(pairs, torch.outer(probs, probs).flatten()) > PASS


def test_flat_rows_reach_every_token_equally():
    token_ids = many(torch.zeros(512), row(seed=3), 30_000)
    assert p_value(token_ids, torch.full((512,), 1 / 512)) > PASS


def wrong_temperature_after(logits, sampling):
    return row(**{**sampling, "temperature": 1.0}), logits


def wrong_top_k_off_by_one(logits, sampling):
    return row(**{**sampling, "top_k": sampling["top_k"] + 1}), logits


def wrong_top_p_drops_the_crossing_token(logits, sampling):
    kept = exact(logits, row(**sampling))
    crossing = kept.where(kept > 0, 2).argmin()
    return row(**{**sampling, "top_p": 1.0}), logits.masked_fill(
        (kept == 0) | (torch.arange(len(logits)) == crossing), -math.inf
    )


def wrong_min_p_absolute(logits, sampling):
    kept = logits.softmax(dim=-1) >= sampling["min_p"]
    return row(**{**sampling, "min_p": 0.0}), logits.masked_fill(~kept, -math.inf)


@pytest.mark.parametrize(
    "wrong, sampling",
    [
        (wrong_temperature_after, {"temperature": 0.8}),
        (wrong_top_k_off_by_one, {"top_k": 5}),
        (wrong_top_p_drops_the_crossing_token, {"top_p": 0.8}),
        (wrong_min_p_absolute, {"min_p": 0.1}),
    ],
)
def test_the_chi_square_test_sees_a_wrong_sampler(wrong, sampling):
    torch.manual_seed(7)
    logits = torch.randn(30) * 1.5
    token_ids = many(wrong(logits, sampling)[1], wrong(logits, sampling)[0], 20_000)
    assert p_value(token_ids, exact(logits, row(**sampling))) < FAIL


def test_the_chi_square_test_sees_wrong_noise():
    torch.manual_seed(7)
    logits = torch.randn(30)
    place = torch.arange(20_000)
    u = uniform(place * 0, place * 0, place, 0, 30)
    # argmax of logits + log(u) is no draw from the softmax; nor is noise shared by two tokens.
    for noise in (u.log(), -(-u[:, torch.arange(30) // 2].log()).log()):
        token_ids = (logits + noise).argmax(dim=-1)
        assert p_value(token_ids, logits.softmax(dim=-1)) < FAIL


def test_the_pair_test_sees_positions_that_repeat():
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 0.2])
    rows = [row(position=i // 2) for i in range(30_000)]
    token_ids = sample(logits.expand(30_000, -1), batch(*rows))
    probs = logits.double().softmax(dim=-1)
    pairs = token_ids[0::2] * 5 + token_ids[1::2]
    assert p_value(pairs, torch.outer(probs, probs).flatten()) < FAIL


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_k67_huge_temperature_is_flat(temperature):
    logits = torch.tensor([1e4, -1e4, 0.0, -math.inf])
    token_ids = many(logits, row(temperature=temperature), 3000)
    assert p_value(token_ids, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0])) > PASS


def test_token_probs_and_draw_agree_with_sample_in_distribution():
    torch.manual_seed(0)
    logits = torch.randn(25)
    sampling = row(temperature=0.8, top_k=12, top_p=0.9)
    probs = exact(logits, sampling).float()
    u = uniform(torch.tensor([9]), torch.tensor([0]), torch.tensor([0]), 0, 20_000)[0]
    by_inverse = draw(probs.expand(20_000, -1), u)
    assert p_value(by_inverse, probs) > PASS
    assert p_value(many(logits, sampling, 20_000), probs) > PASS
