"""Which tokens survive top-k, top-p and min-p: against brute force in float64, row by row."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minivllm.ops import filters
from minivllm.ops.filters import survivors
from minivllm.ops.sampling import scale, token_probs


def brute_force(logits, temperature, top_k, top_p, min_p):
    """Set of surviving ids, and how close the nucleus came to ending elsewhere (relative mass)."""
    top_p = torch.tensor(top_p, dtype=torch.float32).item()  # the engine keeps float32
    best = max(logits)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k == 1:
        return {ranked[0]}, 1.0
    weight = [math.exp((value - best) / temperature) for value in logits]
    kept = set(ranked)
    if 0 < top_k < len(logits):
        kept = {i for i in ranked if logits[i] >= logits[ranked[top_k - 1]]}
    margin = 1.0
    if top_p < 1:
        total = math.fsum(weight[i] for i in kept)
        mass, crossing = 0.0, None
        for i in ranked:
            mass += weight[i]
            margin = min(margin, abs(mass / total - top_p))
            if mass >= top_p * total:
                crossing = i
                break
        if crossing == ranked[0]:
            return {crossing}, margin
        if crossing is not None:
            kept &= {i for i in ranked if logits[i] >= logits[crossing]}
    return {i for i in kept if weight[i] >= min_p}, margin


def run(logits, temperature, top_k, top_p, min_p):
    """`survivors` on plain lists, one entry a row."""
    return survivors(
        scale(torch.tensor(logits), torch.tensor(temperature)),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
    )


def ids(mask):
    return set(mask.nonzero().squeeze(-1).tolist())


def random_row(rng, vocab):
    # Multiples of 1/8: ties abound, and what differs stays different when scaled in float32.
    spread = rng.choice([1, 8, 64])
    logits = [rng.randint(-spread, spread) / 8 for _ in range(vocab)]
    if rng.random() < 0.3:
        logits = [v if i == 0 or rng.random() < 0.7 else -math.inf for i, v in enumerate(logits)]
    return (
        logits,
        rng.choice([0.1, 0.5, 1.0, 2.0, 7.0]),
        rng.choice([0, 0, 1, 2, 3, vocab - 1, vocab, vocab + 5, rng.randint(1, vocab)]),
        rng.choice([1.0, 1.0, 1e-9, rng.random(), rng.random()]),
        rng.choice([0.0, 0.0, rng.random() ** 3, 0.5]),
    )


@pytest.mark.parametrize("vocab", [1, 5, 17, 320])
@pytest.mark.parametrize("first_width", [2, 256])
def test_k56_k58_equals_brute_force(vocab, first_width, monkeypatch):
    monkeypatch.setattr(filters, "FIRST_TOP_P_WIDTH", first_width)
    rng = random.Random(vocab)
    rows = [random_row(rng, vocab) for _ in range(400)]
    kept = run(*zip(*rows, strict=True))
    excused = 0
    for row, mask in zip(rows, kept, strict=True):
        expected, margin = brute_force(*row)
        # An exact hit of top_p is decided by the last bit of a sum. Chance makes none of those,
        # ties do (half of two equal ones), and few of them are allowed here.
        if margin < 1e-6:
            excused += 1
            continue
        live = {i for i, value in enumerate(row[0]) if value > -math.inf}
        assert ids(mask) & live == expected & live, row
    assert excused <= 4


@pytest.mark.parametrize("vocab", [5, 17, 320])
def test_token_probs_has_the_same_survivors(vocab):
    rng = random.Random(vocab)
    rows = [
        row for row in (random_row(rng, vocab) for _ in range(300)) if brute_force(*row)[1] > 1e-6
    ]
    logits, temperature, top_k, top_p, _ = zip(*rows, strict=True)
    logits = torch.tensor(logits)
    kept = run(logits.tolist(), temperature, top_k, top_p, [0.0] * len(rows))
    probs = token_probs(logits, torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p))
    # float32 has no probability below e**-104: these rows span e**-160 at temperature 0.1.
    visible = scale(logits, torch.tensor(temperature)) > -80
    assert torch.equal((probs > 0) & visible, kept & visible)


def test_ties_at_the_cut_stay():
    row = [3.0, 2.0, 2.0, 2.0, 1.0]
    assert ids(run([row], [1.0], [2], [1.0], [0.0])[0]) == {0, 1, 2, 3}
    # exp: 20.1, 7.4 x 3, 2.7; 0.5 of 45 ends within the tie
    assert ids(run([row], [1.0], [0], [0.5], [0.0])[0]) == {0, 1, 2, 3}
    assert ids(run([row], [1.0], [0], [1.0], [math.exp(-1) * 0.999])[0]) == {0, 1, 2, 3}
    # The mass of a tie that top-k let in counts for top-p: 20.1 of 42.3, not of 27.5.
    assert ids(run([row], [1.0], [2], [0.6], [0.0])[0]) == {0, 1, 2, 3}
    assert ids(run([row], [1.0], [2], [0.4], [0.0])[0]) == {0}


def test_the_crossing_token_is_inside():
    row = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    for top_p, expected in [(0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})]:
        assert ids(run([row], [1.0], [0], [top_p], [0.0])[0]) == expected


def test_order_of_the_filters():
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # top-k 2 leaves 4/7 and 3/7, so that 0.5 ends at the first; of the whole row it would not.
    assert ids(run([row], [1.0], [2], [0.5], [0.0])[0]) == {0}
    assert ids(run([row], [1.0], [0], [0.5], [0.0])[0]) == {0, 1}
    # min-p first would leave mass 0.9, of which 0.75 is 0.675: two tokens. After top-p: three.
    assert ids(run([row], [1.0], [0], [0.75], [0.45])[0]) == {0, 1, 2}
    # The filters see the tempered distribution: at T = 1/2 it is 16 : 9 : 4 : 1.
    assert ids(run([row], [0.5], [0], [0.52], [0.0])[0]) == {0}


def test_k56_tiny_top_p_leaves_the_lowest_best_token():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn(50, 320).to(dtype).float()
        flat = torch.zeros(1, 4096)
        nearly_flat = torch.zeros(1, 4096)
        nearly_flat[0, 1234] = 1e-6
        for top_p in (0.0, 1e-30, 1e-9, 1e-7, 1e-3):
            for top_k in (0, 3):
                for logits in (rows, flat, nearly_flat):
                    if top_p == 1e-3 and logits is not rows:
                        continue  # it takes five of 4096 equal tokens: the tie stays
                    n = len(logits)
                    kept = run(logits.tolist(), [1.0] * n, [top_k] * n, [top_p] * n, [0.0] * n)
                    assert kept.sum(dim=-1).tolist() == [1] * n
                    assert torch.equal(kept.int().argmax(dim=-1), logits.argmax(dim=-1))


def test_k56_flat_row_keeps_its_ties_where_top_p_needs_several():
    assert run([[0.0] * 4096], [1.0], [0], [1e-3], [0.0]).all()


def test_k58_top_k_at_and_beyond_the_vocabulary():
    torch.manual_seed(0)
    logits = torch.randn(1, 320).tolist()
    for top_k, expected in [(0, 320), (1, 1), (2, 2), (319, 319), (320, 320), (321, 320)]:
        assert int(run(logits, [1.0], [top_k], [1.0], [0.0]).sum()) == expected
    mixed = run(logits * 4, [1.0] * 4, [1, 325, 0, 7], [1.0] * 4, [0.0] * 4)
    assert mixed.sum(dim=-1).tolist() == [1, 320, 320, 7]


def test_min_p_one_keeps_all_best_tokens():
    assert ids(run([[2.0, 1.0, 2.0]], [1.0], [0], [1.0], [1.0])[0]) == {0, 2}


def test_a_row_does_not_depend_on_its_batch():
    rng = random.Random(3)
    rows = [random_row(rng, 320) for _ in range(60)]
    whole = run(*zip(*rows, strict=True))
    for row, mask in zip(rows, whole, strict=True):
        assert torch.equal(run(*([value] for value in row))[0], mask)


def test_wide_rows_near_the_cut_do_not_depend_on_the_batch():
    # 30,000 tokens of nearly equal mass: a float32 sum would move the cut with its order.
    torch.manual_seed(0)
    logits = torch.randn(6, 30_000) * 0.1
    ones, off = torch.ones(6), torch.zeros(6, dtype=torch.int32)
    kept = survivors(scale(logits, ones), off, ones * 0.9, ones * 0)
    for i in range(6):
        alone = survivors(scale(logits[i : i + 1], ones[:1]), off[:1], ones[:1] * 0.9, ones[:1] * 0)
        assert torch.equal(alone[0], kept[i])
    mass = logits.double().softmax(dim=-1)
    inside = (mass * kept).sum(dim=-1)
    least = mass.masked_fill(~kept, 1).amin(dim=-1)
    assert ((inside >= 0.9 - 1e-6) & (inside - least < 0.9 + 1e-6)).all()


def test_rows_without_any_finite_logit_and_inputs_unchanged():
    scaled = scale(torch.full((2, 8), -math.inf), torch.ones(2))
    before = scaled.clone()
    arguments = torch.tensor([3, 0]), torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.0])
    kept = survivors(scaled, *arguments)
    assert kept.any(dim=-1).all()
    assert torch.equal(scaled, before)
    assert [argument.tolist() for argument in arguments] == [
        [3, 0],
        [0.5, 0.5],
        pytest.approx([0.1, 0.0]),
    ]
