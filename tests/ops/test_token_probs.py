"""The units of lesson 01: the distribution of the next token, and a draw from it."""

from __future__ import annotations

import math

import pytest
import torch

from minivllm.ops.sampling import draw, token_probs


def probs_of(logits, temperature=1.0, top_k=0, top_p=1.0):
    return token_probs(
        torch.tensor([logits]),
        torch.tensor([temperature]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
    )[0].tolist()


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 4}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.35}, [0, 1, 0, 0]),
        ({"top_p": 0.0}, [0, 1, 0, 0]),
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0]),
    ],
)
def test_worked_by_hand(settings, expected):
    assert probs_of(LOGITS, **settings) == pytest.approx(expected, abs=1e-6)


def test_ties_at_the_cut_stay_and_single_places_go_to_the_lowest_id():
    assert probs_of([2.0, 1.0, 1.0, 0.0], top_k=2)[1] > 0
    assert probs_of([2.0, 1.0, 1.0, 0.0], top_k=2)[2] > 0
    assert probs_of([0.0, 5.0, 5.0], top_k=1) == [0, 1, 0]
    assert probs_of([0.0, 5.0, 5.0], temperature=0.0) == [0, 1, 0]
    assert probs_of([0.0, 5.0, 5.0], top_p=0.4) == [0, 1, 0]
    assert probs_of([0.0, 5.0, 5.0], top_p=0.6) == pytest.approx([0, 0.5, 0.5])


def test_each_row_has_its_own_settings():
    got = token_probs(
        torch.tensor([LOGITS] * 4),
        torch.tensor([1.0, 0.0, 1.0, 0.5]),
        torch.tensor([0, 0, 2, 0], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.5]),
    )
    expected = [
        probs_of(LOGITS),
        probs_of(LOGITS, temperature=0.0),
        probs_of(LOGITS, top_k=2),
        probs_of(LOGITS, temperature=0.5, top_p=0.5),
    ]
    assert torch.allclose(got, torch.tensor(expected))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 1e-4, 1e-2, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_k67_rows_sum_to_one_at_any_temperature(temperature, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(8, 320) * 1e4).clamp(-6e4, 6e4).to(dtype)
    n = torch.ones(8)
    got = token_probs(logits, n * temperature, n.int() * 0, n)
    assert got.dtype == torch.float32
    assert torch.allclose(got.sum(dim=-1), n)
    assert torch.equal(got.argmax(dim=-1), logits.argmax(dim=-1))


def test_k56_tiny_top_p_keeps_the_best():
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(20, 4096), torch.zeros(1, 4096)]).bfloat16()
    n = torch.ones(21)
    for top_p in (0.0, 1e-30, 1e-9, 1e-7):
        got = token_probs(logits, n, n.int() * 0, n * top_p)
        assert torch.equal(got.max(dim=-1).values, n)
        assert torch.equal(got.argmax(dim=-1), logits.argmax(dim=-1))


def test_top_p_one_is_off_even_for_tokens_that_round_away():
    logits = torch.zeros(1, 1000)
    logits[0, 0] = 40.0
    got = token_probs(logits, torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1))
    assert (got > 0).all()


def test_masked_tokens_have_no_probability():
    assert probs_of([-math.inf, 0.0, -math.inf], top_k=2) == [0, 1, 0]


def test_arguments_are_unchanged():
    torch.manual_seed(0)
    arguments = [torch.randn(3, 40), torch.rand(3), torch.tensor([0, 5, 99]), torch.rand(3)]
    copies = [argument.clone() for argument in arguments]
    token_probs(*arguments)
    probs, u = token_probs(*arguments), torch.rand(3)
    before = probs.clone(), u.clone()
    draw(probs, u)
    assert all(torch.equal(a, b) for a, b in zip(arguments, copies, strict=True))
    assert torch.equal(probs, before[0])
    assert torch.equal(u, before[1])


@pytest.mark.parametrize(
    "u, expected",
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (0.9999999, 4), (1.0, 4)],
)
def test_draw_inverts_the_running_sum(u, expected):
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    got = draw(probs, torch.tensor([u]))
    assert got.dtype == torch.int64
    assert got.tolist() == [expected]


def test_draw_scales_u_by_the_sum_of_the_row():
    probs = torch.tensor([[0.1, 0.1, 0.2]])
    assert [int(draw(probs, torch.tensor([u]))) for u in (0.2, 0.3, 0.6)] == [0, 1, 2]


def test_draw_never_returns_an_impossible_token():
    torch.manual_seed(0)
    probs = torch.rand(500, 200) * (torch.rand(500, 200) < 0.2)
    probs[:, 0] = probs[:, -1] = 0
    probs[:, 77] += 1e-8
    # Rows that sum to a little less or more than one, and u at and next to its ends.
    probs = probs / probs.sum(dim=-1, keepdim=True) * (1 + 1e-4 * torch.randn(500, 1))
    edges = [0.0, 1e-45, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0]
    for u in [torch.full((500,), edge) for edge in edges] + [torch.rand(500) for _ in range(20)]:
        token = draw(probs, u)
        assert (probs.gather(1, token[:, None]) > 0).all()


def test_draw_of_a_certain_token():
    probs = torch.zeros(3, 9)
    probs[torch.arange(3), torch.tensor([0, 4, 8])] = 1
    for u in (0.0, 0.5, 1.0):
        assert draw(probs, torch.full((3,), u)).tolist() == [0, 4, 8]
