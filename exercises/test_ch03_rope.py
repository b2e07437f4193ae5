"""Visible tests of chapter 03. Each compares with the formula, computed here in float64."""

import math

import pytest
import torch


def angles(head_dim, positions, theta):
    """Angle of every pair at every position, from the definition, in float64: [T, D/2]."""
    pairs = range(head_dim // 2)
    rows = [[p * theta ** (-2 * i / head_dim) for i in pairs] for p in positions]
    return torch.tensor(rows, dtype=torch.float64)


def table(head_dim, max_position, theta):
    """The table that rope_table should give."""
    angle = angles(head_dim, range(max_position), theta)
    return angle.cos().float(), angle.sin().float()


def rotated(x, positions, cos, sin):
    """Each pair (i, i + D/2) as a complex number, turned by its token's angle."""
    half = x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=torch.float64)
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            turn = complex(cos[position, i], sin[position, i])
            for head in range(x.shape[1]):
                pair = complex(x[t, head, i], x[t, head, i + half]) * turn
                out[t, head, i], out[t, head, i + half] = pair.real, pair.imag
    return out.to(x.dtype)


def heads_at_positions(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 3, 16, generator=g) * 2
    positions = torch.tensor([0, 1, 2, 3, 4])
    angle = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(8) / 8))
    return x.to(dtype), positions, angle.cos(), angle.sin()


def half_heads(seed):
    x, positions, cos, sin = heads_at_positions(seed, torch.float16)
    return x, positions + 20, cos, sin


def brain_heads(seed):
    x, positions, cos, sin = heads_at_positions(seed, torch.bfloat16)
    return x, positions + 20, cos, sin


def near_an_axis(seed, dtype=torch.float16):
    g = torch.Generator().manual_seed(seed)
    positions = torch.tensor([11, 25, 38, 52, 63])
    angle = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(8) / 8))
    back, size = angle[positions][:, None], 100 + 200 * torch.rand(5, 3, 8, generator=g)
    x = torch.cat((size * back.sin(), size * back.cos()), dim=-1)  # turns to about (0, size)
    return x.to(dtype), positions, angle.cos(), angle.sin()


def near_an_axis_brain(seed):
    x, positions, cos, sin = near_an_axis(seed, torch.bfloat16)
    return x, positions, cos, sin


def packed_heads(seed):
    _, positions, cos, sin = heads_at_positions(seed)
    g = torch.Generator().manual_seed(seed)
    packed = torch.randn(5, 4 * 16, generator=g)  # [T, (Hq + Hk + Hv) * D]: 2 + 1 + 1 heads
    return packed[:, :32].view(5, 2, 16), positions + 7, cos, sin  # not contiguous


def query_and_key(seed):
    g = torch.Generator().manual_seed(seed)
    angle = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(8) / 8))
    q, k = torch.randn(2, 1, 1, 16, generator=g)
    return q, k, angle.cos(), angle.sin()


@pytest.mark.task("ch03.1")
def test_worked_example_of_the_table(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch03.1")
def test_table(check):
    """angle of pair i at position p is p * theta ** (-2 i / D)"""
    check.close(table(16, 65, 10000.0), 16, 65, 10000.0)


@pytest.mark.task("ch03.1")
def test_table_of_another_theta(check):
    """theta is the one that was passed (SmolLM2: 100 000, Qwen3: 1 000 000)"""
    check.close(table(8, 33, 100000.0), 8, 33, 100000.0)


@pytest.mark.task("ch03.1")
def test_odd_number_of_pairs(check):
    """head_dim 6 has three pairs; the second turns by theta ** (-1/3) per token"""
    check.close(table(6, 10, 500.0), 6, 10, 500.0)


@pytest.mark.task("ch03.1")
def test_one_position(check):
    """a table of one position: nothing is turned yet"""
    check.close((torch.ones(1, 4), torch.zeros(1, 4)), 8, 1, 10000.0)


@pytest.mark.task("ch03.1")
def test_far_positions(check):
    """positions in the hundreds, where 16-bit angles are off by a visible part of a turn"""

    def far_rows(rope_table):
        cos, sin = rope_table(16, 600, 10000.0)
        return cos[500:], sin[500:]

    cos, sin = table(16, 600, 10000.0)
    check.probe((cos[500:], sin[500:]), far_rows)


@pytest.mark.task("ch03.2")
def test_worked_example(check):
    """the worked example of the stub"""
    check.example()


@pytest.mark.task("ch03.2")
def test_rotation(check):
    """the pairs (i, i + D/2) of every head, at positions 0, 1, 2, ..."""
    x, positions, cos, sin = check.inputs(heads_at_positions)
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_position_zero(check):
    """at position 0 nothing moves"""
    x, positions, cos, sin = check.inputs(heads_at_positions, seed=1)
    check.close(x, x, torch.zeros_like(positions), cos, sin)


@pytest.mark.task("ch03.2")
def test_start_in_the_middle(check):
    """positions that start at 11, as after a cached prefix"""
    x, positions, cos, sin = check.inputs(heads_at_positions, seed=2)
    check.close(rotated(x, positions + 11, cos, sin), x, positions + 11, cos, sin)


@pytest.mark.task("ch03.2")
def test_jumping_positions(check):
    """one token each of several sequences: positions out of order, one of them twice"""
    x, _, cos, sin = check.inputs(heads_at_positions, seed=3)
    positions = torch.tensor([40, 3, 63, 3, 0])
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_as_many_heads_as_tokens(check):
    """T = H: the angle belongs to the token, not to the head"""
    x, positions, cos, sin = check.inputs(heads_at_positions, seed=4)
    x, positions = x[:3], positions[:3] + 2
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_one_token_one_head(check):
    """a single decoded token"""
    x, _, cos, sin = check.inputs(heads_at_positions, seed=5)
    x, positions = x[:1, :1], torch.tensor([29])
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_distance_alone(check):
    """the product of a query and a key 5 tokens before it is the same wherever the two stand"""
    q, k, cos, sin = check.inputs(query_and_key)

    def products(apply_rope):
        found = []
        for p in (5, 6, 30, 63):
            turned_q = apply_rope(q.clone(), torch.tensor([p]), cos, sin)
            turned_k = apply_rope(k.clone(), torch.tensor([p - 5]), cos, sin)
            found.append((turned_q * turned_k).sum())
        return torch.stack(found) / 16

    at_five = rotated(q, torch.tensor([5]), cos, sin).double()
    check.probe(((at_five * k.double()).sum() / 16).float().repeat(4), products)


@pytest.mark.task("ch03.2")
def test_float16(check):
    """float16 in, float16 out"""
    x, positions, cos, sin = check.inputs(half_heads)
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_bfloat16(check):
    """bfloat16 in, bfloat16 out"""
    x, positions, cos, sin = check.inputs(brain_heads)
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_products_in_float32(check):
    """16-bit heads at far positions: large products that all but cancel, so multiply in float32"""
    x, positions, cos, sin = check.inputs(near_an_axis)
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)
    x, positions, cos, sin = check.inputs(near_an_axis_brain)
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_view_of_packed_qkv(check):
    """queries that are a slice of one packed tensor of q, k and v"""
    x, positions, cos, sin = check.inputs(packed_heads)
    check.close(rotated(x, positions, cos, sin), x, positions, cos, sin)


@pytest.mark.task("ch03.2")
def test_lengths_stay(check):
    """a rotation changes no vector's length"""
    x, positions, cos, sin = check.inputs(heads_at_positions, seed=6)

    def lengths(apply_rope):
        return apply_rope(x.clone(), positions + 13, cos, sin).norm(dim=-1)

    expected = [[math.dist([0.0] * 16, head) for head in token] for token in x.tolist()]
    check.probe(torch.tensor(expected), lengths)


@pytest.mark.task("ch03.2")
def test_inputs_stay(check):
    """x, positions and the table stay as they were"""
    x, positions, cos, sin = check.inputs(heads_at_positions, seed=7)
    check.leaves_inputs_alone(x, positions, cos, sin)
