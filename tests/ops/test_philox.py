"""Philox against published answers and a plain-integer form, and the uniform numbers made of it."""

from __future__ import annotations

import pytest
import torch

from minivllm.ops.philox import _to_unit, philox, uniform, uniform_at

# Known answers for philox4x32-10 published with Random123: counter, key, output.
KNOWN = {
    "zeros": (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    "ones": (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    "pi": (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}


def words(text):
    return [int(word, 16) for word in text.split()]


def plain_philox(counter, key):
    """The paper's definition in Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def plain_uniform(seed, sample_index, position, token_id):
    counter = (token_id // 4, position % 2**32, sample_index % 2**32, 0)
    word = plain_philox(counter, (seed % 2**32, (seed >> 32) % 2**32))[token_id % 4]
    return ((word >> 9) + 0.5) / 2**23


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("name", KNOWN)
def test_published_answers(name):
    counter, key, expected = (words(text) for text in KNOWN[name])
    assert plain_philox(counter, key) == expected
    got = philox(tuple(i64(c) for c in counter), tuple(i64(k) for k in key))
    assert [int(word) for word in got] == expected


def test_equals_plain_integers_on_random_words():
    torch.manual_seed(0)
    c = torch.randint(0, 2**32, (4, 200))
    k = torch.randint(0, 2**32, (2, 200))
    got = torch.stack(philox(tuple(c), tuple(k)))
    for i in range(200):
        assert got[:, i].tolist() == plain_philox(c[:, i].tolist(), k[:, i].tolist())


def test_words_broadcast_and_stay_in_range():
    got = philox((torch.arange(50)[None], *i64(1, 2, 3)), (i64(7, 8)[:, None], i64(9)))
    assert all(word.shape == (2, 50) for word in got)
    assert all(((word >= 0) & (word < 2**32)).all() for word in got)


def test_uniform_equals_its_definition():
    seeds, indices, positions = [0, 5, 2**32 + 5, -1, -(2**63)], [0, 1, 2, 3, 4], [0, 9, 8, 7, 6]
    got = uniform(i64(*seeds), i64(*indices), i64(*positions), 0, 41)
    expected = [
        [plain_uniform(s, i, p, token) for token in range(41)]
        for s, i, p in zip(seeds, indices, positions, strict=True)
    ]
    # Equal in float32 and in float64: the numbers are exact, not rounded.
    assert got.dtype == torch.float32
    assert got.double().tolist() == expected


def test_uniform_of_large_token_ids_and_positions():
    token_id, position = 2**31 + 3, 2**32 - 1
    got = uniform(i64(3), i64(2**20), i64(position), token_id, 1)
    assert got.item() == plain_uniform(3, 2**20, position, token_id)


def test_uniform_is_never_zero_or_one():
    edges = _to_unit(i64(0, 2**32 - 1, 511, 512)).double()
    assert edges.tolist() == [2.0**-24, 1 - 2.0**-24, 2.0**-24, 3 * 2.0**-24]
    noise = -torch.log(-torch.log(edges.float()))
    assert noise.isfinite().all()


def test_uniform_has_the_moments_of_a_uniform():
    u = uniform(i64(1, 2), i64(0, 0), i64(3, 3), 0, 100_000).double()
    # Five standard errors of the mean, and of the mean square: 1/sqrt(12 n) and sqrt(4/45 n).
    assert (u.mean(dim=1) - 1 / 2).abs().max() < 5 / (12 * 1e5) ** 0.5
    assert (u.square().mean(dim=1) - 1 / 3).abs().max() < 5 * (4 / 45 / 1e5) ** 0.5
    assert abs((u[0] * u[1]).mean() - 1 / 4) < 5 * (7 / 144 / 1e5) ** 0.5


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 5, 63, 111])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 6, 64])
def test_a_shard_draws_its_part_of_the_row(start, size):
    args = i64(11, 12), i64(0, 1), i64(5, 6)
    whole = uniform(*args, 0, 200)
    assert torch.equal(uniform(*args, start, size), whole[:, start : start + size])


def test_uniform_at_equals_the_row():
    seed, index, position = i64(4, -9), i64(0, 3), i64(100, 200)
    whole = uniform(seed, index, position, 0, 77)
    row, token = i64(0, 1, 1, 0, 1), i64(0, 76, 33, 2, 5)
    got = uniform_at(seed[row], index[row], position[row], token)
    assert torch.equal(got, whole[row, token])
    nothing = i64()
    assert uniform_at(nothing, nothing, nothing, nothing).shape == (0,)


def test_each_coordinate_matters():
    base = (7, 1, 5)
    rows = [base, (8, 1, 5), (7 + 2**32, 1, 5), (7, 2, 5), (7, 1, 6), (1, 7, 5), (7, 5, 1)]
    u = uniform(*(i64(*column) for column in zip(*rows, strict=True)), 0, 64)
    for i in range(len(rows)):
        for j in range(i):
            # Two unrelated rows agree in an entry with probability 2**-23.
            assert (u[i] == u[j]).sum() == 0
    assert u.unique().numel() == u.numel()


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(1)
    seed, index, position = torch.randint(0, 2**40, (3, 9))
    whole = uniform(seed, index, position, 0, 50)
    for i in range(9):
        alone = uniform(seed[i : i + 1], index[i : i + 1], position[i : i + 1], 0, 50)
        assert torch.equal(alone[0], whole[i])
    order = torch.randperm(9)
    assert torch.equal(uniform(seed[order], index[order], position[order], 0, 50), whole[order])


def test_k09_global_generator_is_untouched():
    before = torch.random.get_rng_state()
    uniform(i64(1), i64(0), i64(0), 0, 10)
    assert torch.equal(before, torch.random.get_rng_state())
