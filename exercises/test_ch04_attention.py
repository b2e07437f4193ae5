"""Visible tests of chapter 04. Each compares with the formula, computed here in float64."""

import math

import pytest
import torch


def formula(q, k, v, scale, q_start):
    """One query, one head, one key at a time, in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = k[:, h // group].double(), v[:, h // group].double()
            seen = range(min(q_start + i + 1, k.shape[0]))
            scores = [float(q[i, h].double() @ keys[j]) * scale for j in seen]
            shares = [math.exp(score - max(scores)) for score in scores]
            for j in seen:
                out[i, h] += shares[j] / sum(shares) * values[j]
    return out.to(q.dtype)


def sequence(seed, tq=7, tk=7, hq=6, hkv=2, d=8):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(tq, hq, d, generator=g) * 1.5
    k = torch.randn(tk, hkv, d, generator=g) * 1.5
    v = torch.randn(tk, hkv, d, generator=g) * 2 + 0.5
    return q, k, v


def chunk(seed):
    return sequence(seed, tq=3, tk=9)  # positions 6, 7, 8 of 9


def decode_step(seed):
    return sequence(seed, tq=1, tk=11)  # one new token, position 10


def middle_part(seed):
    return sequence(seed, tq=4, tk=13)  # positions 5 to 8 of 13: keys behind are the future


def one_kv_head(seed):
    return sequence(seed, hq=5, hkv=1)


def as_many_kv_heads(seed):
    return sequence(seed, hq=3, hkv=3)


def half_sequence(seed):
    return tuple(tensor.half() for tensor in sequence(seed))


def brain_sequence(seed):
    return tuple(tensor.bfloat16() for tensor in sequence(seed))


def huge_scores(seed):
    g = torch.Generator().manual_seed(seed)
    # Whole numbers: the scores are exact in float32, thousands in size, and often tie.
    q = torch.randint(-40, 41, (6, 4, 16), generator=g).float()
    k = torch.randint(-40, 41, (6, 2, 16), generator=g).float()
    return q, k, torch.randn(6, 2, 16, generator=g)


def low_scores(seed):
    q, k, v = huge_scores(seed)
    return -q.abs() - 20, k.abs() + 20, v  # every product is far below zero


def half_overflow(seed):
    g = torch.Generator().manual_seed(seed)
    # Products q . k in the hundred thousands: float16 ends at 65504.
    q = torch.randint(100, 200, (5, 4, 16), generator=g).half()
    k = torch.randint(100, 200, (5, 2, 16), generator=g).half()
    return q, k, torch.randn(5, 2, 16, generator=g).half()


def packed_qkv(seed):
    g = torch.Generator().manual_seed(seed)
    packed = torch.randn(5, (4 + 2 + 2) * 8, generator=g)  # [T, (Hq + Hk + Hv) * D]
    q, k, v = packed.split([32, 16, 16], dim=-1)
    return q.view(5, 4, 8), k.view(5, 2, 8), v.view(5, 2, 8)  # not contiguous


SCALE = 8**-0.5


@pytest.mark.task("ch04.1")
def test_worked_example(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch04.1")
def test_whole_sequence(check):
    """a prompt of 7 tokens, 6 query heads on 2 KV heads"""
    q, k, v = check.inputs(sequence)
    check.close(formula(q, k, v, SCALE, 0), q, k, v, SCALE, 0)


@pytest.mark.task("ch04.1")
def test_one_token(check):
    """a single token reads itself: the result is its own value"""
    q, k, v = check.inputs(sequence, seed=1)
    q, k, v = q[:1], k[:1], v[:1]
    check.close(v.repeat_interleave(3, dim=1), q, k, v, SCALE, 0)


@pytest.mark.task("ch04.1")
def test_one_kv_head(check):
    """all query heads on one KV head (MQA)"""
    q, k, v = check.inputs(one_kv_head)
    check.close(formula(q, k, v, SCALE, 0), q, k, v, SCALE, 0)


@pytest.mark.task("ch04.1")
def test_as_many_kv_heads(check):
    """a KV head for each query head (MHA)"""
    q, k, v = check.inputs(as_many_kv_heads)
    check.close(formula(q, k, v, SCALE, 0), q, k, v, SCALE, 0)


@pytest.mark.task("ch04.1")
def test_end_of_a_sequence(check):
    """queries 6, 7 and 8 of 9 (q_start = 6): query i sees the keys up to q_start + i"""
    q, k, v = check.inputs(chunk)
    check.close(formula(q, k, v, SCALE, 6), q, k, v, SCALE, 6)


@pytest.mark.task("ch04.1")
def test_decode_step(check):
    """one new token at position 10 sees all 11 keys"""
    q, k, v = check.inputs(decode_step)
    check.close(formula(q, k, v, SCALE, 10), q, k, v, SCALE, 10)


@pytest.mark.task("ch04.1")
def test_later_keys_behind(check):
    """queries 5 to 8 of 13: the four keys behind them are the future too"""
    q, k, v = check.inputs(middle_part)
    check.close(formula(q, k, v, SCALE, 5), q, k, v, SCALE, 5)


@pytest.mark.task("ch04.1")
def test_chunks(check):
    """a prompt in three chunks gives what the whole prompt gives"""
    q, k, v = check.inputs(sequence, seed=2)

    def in_chunks(attention):
        parts = [
            attention(q[a:b].clone(), k[:b].clone(), v[:b].clone(), SCALE, a)
            for a, b in ((0, 3), (3, 4), (4, 7))
        ]
        return torch.cat(parts)

    check.probe(formula(q, k, v, SCALE, 0), in_chunks)


@pytest.mark.task("ch04.1")
def test_given_scale(check):
    """the scale that was passed, not one of its own"""
    q, k, v = check.inputs(sequence, seed=3)
    check.close(formula(q, k, v, 0.1, 0), q, k, v, 0.1, 0)


@pytest.mark.task("ch04.1")
def test_huge_scores(check):
    """scores in the thousands: exp of them is infinite, their softmax is not"""
    q, k, v = check.inputs(huge_scores)
    check.close(formula(q, k, v, 0.25, 0), q, k, v, 0.25, 0)


@pytest.mark.task("ch04.1")
def test_low_scores(check):
    """scores far below zero: no masked score may be above them"""
    q, k, v = check.inputs(low_scores)
    check.close(formula(q, k, v, 0.25, 0), q, k, v, 0.25, 0)


@pytest.mark.task("ch04.1")
def test_very_low_scores(check):
    """scores of minus ten thousand and far less: only minus infinity is below them all"""
    q, k, v = check.inputs(low_scores, seed=1)
    check.close(formula(q, k, v, 8.0, 0), q, k, v, 8.0, 0)


@pytest.mark.task("ch04.1")
def test_float16(check):
    """float16 in, float16 out"""
    q, k, v = check.inputs(half_sequence)
    check.close(formula(q, k, v, SCALE, 0), q, k, v, SCALE, 0)


@pytest.mark.task("ch04.1")
def test_bfloat16(check):
    """bfloat16 in, bfloat16 out"""
    q, k, v = check.inputs(brain_sequence)
    check.close(formula(q, k, v, SCALE, 0), q, k, v, SCALE, 0)


@pytest.mark.task("ch04.1")
def test_products_beyond_float16(check):
    """float16 queries and keys whose products are beyond float16"""
    q, k, v = check.inputs(half_overflow)
    check.close(formula(q, k, v, 1 / 4096, 0), q, k, v, 1 / 4096, 0)


@pytest.mark.task("ch04.1")
def test_views_of_packed_qkv(check):
    """q, k and v that are slices of one packed tensor"""
    q, k, v = check.inputs(packed_qkv)
    check.close(formula(q, k, v, SCALE, 0), q, k, v, SCALE, 0)


@pytest.mark.task("ch04.1")
def test_second_call(check):
    """a call of another length after the first: nothing is kept"""
    q, k, v = check.inputs(sequence, seed=4)

    def two_calls(attention):
        short = attention(q[:3].clone(), k[:3].clone(), v[:3].clone(), SCALE, 0)
        return short, attention(q.clone(), k.clone(), v.clone(), SCALE, 0)

    whole = formula(q, k, v, SCALE, 0)
    check.probe((whole[:3], whole), two_calls)


@pytest.mark.task("ch04.1")
def test_inputs_stay(check):
    """q, k and v stay as they were"""
    q, k, v = check.inputs(sequence, seed=5)
    check.leaves_inputs_alone(q, k, v, SCALE, 0)
