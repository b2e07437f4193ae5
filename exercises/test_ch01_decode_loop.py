"""Visible tests of chapter 01. No time is measured: calls of the model and draws are counted."""

import math

import pytest
import torch

VOCAB = 23


class Model:
    """Logits of a made-up language in which each next token depends on all tokens before it."""

    def __init__(self):
        self.calls = []

    def __call__(self, ids):
        assert ids.dim() == 2 and ids.shape[0] == 1, f"ids must be [1, T], not {list(ids.shape)}"
        assert ids.dtype == torch.int64, "ids must be int64"
        self.calls.append(ids.shape[1])
        if len(self.calls) == 50:
            raise TimeoutError("called 50 times for 9 tokens at most: does the loop end?")
        tokens = ids[0].tolist()
        logits = torch.zeros(1, len(tokens), VOCAB)
        for row in range(len(tokens)):
            logits[0, row, following(tokens[: row + 1])] = 1.0
        return logits


def following(tokens):
    """The next token of that language."""
    return sum((i + 2) * (token + 1) for i, token in enumerate(tokens)) % VOCAB


def expected(ids, count):
    """The continuation, token by token."""
    tokens = list(ids)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(ids) :]


def prompt(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (6,), generator=g).tolist()


@pytest.mark.task("ch01.1")
def test_worked_example_of_generate(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch01.1")
def test_tokens(check):
    """each next token is the best one after the whole text so far"""
    ids = check.inputs(prompt)
    check.probe(expected(ids, 9), lambda generate: generate(Model(), list(ids), 9))


@pytest.mark.task("ch01.1")
def test_work(check):
    """one call per new token, with the whole text so far: 6 + 7 + 8 + 9 + 10 tokens computed"""
    ids = check.inputs(prompt, seed=1)

    def calls(generate):
        model = Model()
        generate(model, list(ids), 5)
        return model.calls, sum(model.calls)

    check.probe(([6, 7, 8, 9, 10], 40), calls)


@pytest.mark.task("ch01.1")
def test_short_prompt(check):
    """a prompt of one token"""
    check.probe(expected([4], 3), lambda generate: generate(Model(), [4], 3))


@pytest.mark.task("ch01.1")
def test_end_token(check):
    """a token of eos_ids ends the text, is part of it, and nothing is computed after it"""
    ids = check.inputs(prompt, seed=2)
    text = expected(ids, 8)
    end = text[3]
    wanted = text[: text.index(end) + 1]

    def with_end(generate):
        model = Model()
        return generate(model, list(ids), 8, [VOCAB, end]), len(model.calls)

    check.probe((wanted, len(wanted)), with_end)


@pytest.mark.task("ch01.1")
def test_end_token_in_the_prompt(check):
    """a token of eos_ids in the prompt ends nothing"""
    ids = check.inputs(prompt, seed=3)
    ends = set(ids) - set(expected(ids, 3))
    check.probe(expected(ids, 3), lambda generate: generate(Model(), list(ids), 3, ends))


@pytest.mark.task("ch01.1")
def test_lengths(check):
    """max_new is the most new tokens: none (and no call), one, two"""
    ids = check.inputs(prompt, seed=4)

    def lengths(generate):
        model = Model()
        texts = [generate(model, list(ids), count) for count in (0, 1, 2)]
        return texts, model.calls

    check.probe(([expected(ids, count) for count in (0, 1, 2)], [6, 6, 7]), lengths)


@pytest.mark.task("ch01.1")
def test_prompt_stays(check):
    """ids is the caller's list and stays as it was"""
    ids = check.inputs(prompt, seed=5)

    def used_prompt(generate):
        mine = list(ids)
        generate(Model(), mine, 3)
        return mine

    check.probe(ids, used_prompt)


def logits_of(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(5, 37, generator=g)).to(dtype)  # 5 rows, V=37


def bfloat16_logits(seed):
    return logits_of(seed, torch.bfloat16)


def numbers(temperature=1.0, top_k=0, top_p=1.0, rows=5):
    """The three numbers of each row as tensors; a list gives each row its own."""

    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return (
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
    )


def exact(logits, temperature, top_k, top_p):
    """The contract, row by row and token by token, in float64."""
    rows = []
    for row, t, k, p in zip(
        logits.double().tolist(), temperature.tolist(), top_k.tolist(), top_p.tolist()
    ):
        best = row.index(max(row))
        scaled = [(value - row[best]) / max(t, 1e-5) for value in row]
        ranked = sorted(scaled, reverse=True)
        if k:
            floor = ranked[min(k, len(row)) - 1]
            ranked = [value for value in ranked if value >= floor]
        weights = [math.exp(value) for value in ranked]
        reached, one = 0, False
        if p < 1:
            total, running = sum(weights), weights[0]
            one = running / total >= p
            while running / total < p:
                reached += 1
                running += weights[reached]
            ranked = [value for value in ranked if value >= ranked[reached]]
        kept = [math.exp(value) * (value >= ranked[-1]) for value in scaled]
        if t < 1e-5 or k == 1 or one:
            kept = [float(i == best) for i in range(len(row))]
        rows.append([weight / sum(kept) for weight in kept])
    return torch.tensor(rows, dtype=torch.float64).float()


def asks(check, logits, *columns):
    """The unit against `exact`."""
    check.close(exact(logits, *columns), logits, *columns)


@pytest.mark.task("ch01.2")
def test_worked_example_of_token_probs(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch01.2")
def test_temperature(check):
    """a temperature per row: below 1 sharper, above 1 flatter"""
    asks(check, check.inputs(logits_of), *numbers(temperature=[0.3, 0.7, 1.0, 1.5, 4.0]))


@pytest.mark.task("ch01.2")
def test_greedy(check):
    """temperature 0 gives the best token, nothing else, beside rows that sample"""
    asks(check, check.inputs(logits_of, seed=1), *numbers(temperature=[0.0, 1.0, 0.0, 1e-6, 0.5]))


@pytest.mark.task("ch01.2")
def test_almost_zero_temperature(check):
    """a temperature below 1e-5 is greedy too, even if the next best token is hardly worse"""
    logits = torch.tensor([[0.0, 1e-6, 5e-7], [3e-6, 0.0, 2e-6]])
    asks(check, logits, *numbers(temperature=[9e-6, 2e-6], rows=2))


@pytest.mark.task("ch01.2")
def test_top_k(check):
    """a top_k per row: off, 2, 5, all, more than there are"""
    asks(check, check.inputs(logits_of, seed=2), *numbers(top_k=[0, 2, 5, 37, 1000]))


@pytest.mark.task("ch01.2")
def test_top_p(check):
    """a top_p per row; the token that crosses it is kept"""
    asks(check, check.inputs(logits_of, seed=3), *numbers(top_p=[0.3, 0.6, 0.9, 0.99, 1.0]))


@pytest.mark.task("ch01.2")
def test_crossing_token(check):
    """probabilities 0.4, 0.3, 0.2, 0.1, not in order: what each top_p keeps"""
    logits = torch.tensor([[0.2, 0.4, 0.1, 0.3]]).log().expand(4, 4)
    asks(check, logits, *numbers(top_p=[0.35, 0.5, 0.75, 0.95], rows=4))


@pytest.mark.task("ch01.2")
def test_all_three(check):
    """top-p is taken among what top-k has left, both at the row's temperature"""
    logits = check.inputs(logits_of, seed=4)
    asks(
        check,
        logits,
        *numbers([0.5, 0.8, 1.2, 2.0, 3.0], [3, 5, 8, 12, 20], [0.9, 0.7] * 2 + [0.8]),
    )


@pytest.mark.task("ch01.2")
def test_exact_zeros(check):
    """what is cut is exactly 0, what is kept is not: the number of tokens left in each row"""
    logits = check.inputs(logits_of, seed=5)
    columns = numbers(top_k=[0, 4, 1, 0, 9], top_p=[1.0, 1.0, 1.0, 0.7, 0.8])
    left = (exact(logits, *columns) > 0).sum(dim=-1)
    check.probe(left, lambda unit: (unit(logits.clone(), *columns) > 0).sum(dim=-1))


@pytest.mark.task("ch01.2")
def test_filters_off(check):
    """top_k = 0 and top_p = 1 cut nothing, not even a token of probability 1e-18"""
    logits = torch.tensor([[0.0, -41.0, -3.0], [-40.0, -41.0, 2.0]])
    columns = numbers(rows=2)
    check.probe([3, 3], lambda unit: (unit(logits.clone(), *columns) > 0).sum(dim=-1).tolist())


@pytest.mark.task("ch01.2")
def test_ties_at_the_cut(check):
    """equal tokens at the cut stay together, for top-k and for top-p"""
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]]).expand(3, 5)
    asks(check, logits, *numbers(top_k=[3, 2, 4], top_p=[1.0, 1.0, 0.95], rows=3))
    asks(check, logits, *numbers(top_p=[0.85, 0.3, 0.7], rows=3))


@pytest.mark.task("ch01.2")
def test_two_best(check):
    """two best tokens: the lower id where one token is wanted, both where more are"""
    logits = torch.tensor([[-900.0, 5.0, -900.0, 5.0, 4.0]]).expand(6, 5)
    asks(
        check,
        logits,
        *numbers([0.0, 1, 1, 1, 1, 0.1], [0, 1, 2, 0, 0, 0], [1, 1, 1, 0.4, 0.5, 0.5]),
    )
    pair = torch.tensor([[-900.0, 5.0, 5.0]])
    asks(check, pair, *numbers(top_p=0.5, rows=1))


@pytest.mark.task("ch01.2")
def test_large_logits(check):
    """logits of 10 000 at a temperature of 0.001: nothing overflows, no digit is lost"""
    logits = 1e4 + check.inputs(logits_of, seed=6) / 1000
    asks(check, logits, *numbers(temperature=0.001, top_p=[1.0, 0.9, 0.8, 0.5, 1.0]))


@pytest.mark.task("ch01.2")
def test_bfloat16(check):
    """bfloat16 logits: computed in float32, and float32 comes out"""
    logits = check.inputs(bfloat16_logits)
    asks(check, logits, *numbers(temperature=[0.3, 0.7, 0.9, 1.5, 0.0], top_p=0.97))


@pytest.mark.task("ch01.2")
def test_logits_stay(check):
    """the inputs are left as they were"""
    logits = check.inputs(logits_of, seed=7)
    check.leaves_inputs_alone(
        logits, *numbers(temperature=[0.5, 0.0, 2.0, 1.0, 1.0], top_k=4, top_p=0.9)
    )


def probabilities(seed):
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(4, 12, generator=g).mul(1.5).softmax(dim=-1)
    return probs * (torch.rand(4, 12, generator=g) < 0.7)  # zeros inside; sums below 1


def larger_probabilities(seed):
    return probabilities(seed) * 1.5  # most sums above 1


def middles(probs):
    """For each token that may be drawn: (row, a u in the middle of its stretch, token)."""
    found = []
    for row, values in enumerate(probs.double().tolist()):
        total, running = sum(values), 0.0
        for token, value in enumerate(values):
            if value:
                found.append((row, (running + value / 2) / total, token))
            running += value
    return found


@pytest.mark.task("ch01.3")
def test_worked_example_of_draw(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch01.3")
def test_each_stretch(check):
    """for each token that has any probability, a u in the middle of its stretch"""
    probs = check.inputs(probabilities)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    rows, u, tokens = zip(*middles(probs))
    check.close(torch.tensor(tokens), probs[list(rows)], torch.tensor(u))


@pytest.mark.task("ch01.3")
def test_edges(check):
    """a u that is exactly a running sum belongs to the next token"""
    probs = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).expand(4, 4)
    check.close(torch.tensor([0, 1, 1, 3]), probs, torch.tensor([0.0, 0.25, 0.5, 0.75]))


@pytest.mark.task("ch01.3")
def test_zeros(check):
    """u = 0 and u = 1 give no token of probability 0"""
    probs = torch.tensor([[0.0, 0.0, 0.5, 0.5, 0.0], [1.0, 0, 0, 0, 0], [0, 0, 0, 0, 1.0]])
    check.close(torch.tensor([2, 0, 4]), probs, torch.zeros(3))
    check.close(torch.tensor([3, 0, 4]), probs, torch.ones(3))


@pytest.mark.task("ch01.3")
def test_other_sums(check):
    """a row whose sum is below 1, or above: u is a part of that sum"""
    for recipe in (probabilities, larger_probabilities):
        probs = check.inputs(recipe, seed=1)
        rows, u, tokens = zip(*middles(probs))
        check.close(torch.tensor(tokens), probs[list(rows)], torch.tensor(u))


def even_draws(unit, count=4000):
    """How often each token comes of `count` evenly spread u."""
    probs = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.3])
    tokens = unit(probs.expand(count, -1), (torch.arange(count) + 0.5) / count)
    return tokens.bincount(minlength=5).tolist()


@pytest.mark.task("ch01.3")
def test_shares(check):
    """4 000 evenly spread u give each token as often as it is likely, to the last draw but one"""
    wanted = [200, 1600, 0, 1000, 1200]
    check.holds(
        lambda unit: all(abs(a - b) <= 1 for a, b in zip(even_draws(unit), wanted)),
        f"about {wanted} draws of the tokens of probability 0.05, 0.4, 0, 0.25, 0.3",
    )


def chi_square(unit, seed):
    """Distance of 20 000 random draws from the distribution that they are drawn from."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(8, generator=g).softmax(dim=-1)
    tokens = unit(probs.expand(20_000, -1), torch.rand(20_000, generator=g))
    wanted = probs * 20_000
    return ((tokens.bincount(minlength=8)[:8] - wanted) ** 2 / wanted).sum().item()


@pytest.mark.task("ch01.3")
def test_distribution(check):
    """20 000 random draws follow the probabilities (chi-square, 7 degrees of freedom)"""
    # Above 40 once in a million seeds, for a right answer.
    check.holds(
        lambda unit: chi_square(unit, check.seed) < 40,
        "the draws of 20 000 random u follow the probabilities (chi-square below 40)",
    )


@pytest.mark.task("ch01.3")
def test_probs_stay(check):
    """the inputs are left as they were"""
    probs = check.inputs(probabilities, seed=2)
    check.leaves_inputs_alone(probs, torch.tensor([0.1, 0.5, 0.9, 1.0]))
