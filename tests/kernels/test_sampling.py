"""The sampling kernel against `ops.sampling`, and its integers against `ops.philox`."""

from __future__ import annotations

import pytest
import torch

from minivllm.engine.step_plan import RowSampling
from minivllm.ops import philox, sampling

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from minivllm.kernels.philox import words  # noqa: E402

MIX = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    {"min_p": 0.1},
    {"top_k": 1},
    {"temperature": 0.5, "top_p": 0.1},
]


@triton.jit
def _words_kernel(p_out, p_seed, p_sample_index, p_position, GROUPS: tl.constexpr):
    o_group = tl.arange(0, GROUPS)
    b_words = words(tl.load(p_seed), tl.load(p_sample_index), tl.load(p_position), o_group)
    o_out = o_group[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(p_out + o_out, b_words.to(tl.int64))


def batch(rows, device, first=0):
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    made = [
        RowSampling(
            **{**plain, **row}, seed=2**63 + 5 * i, sample_index=i % 3, position=7 * i + first
        )
        for i, row in enumerate(rows)
    ]
    return sampling.SamplingBatch.from_rows(made, device)


def agree(logits, rows, first=0, vocab_start=0):
    """Same ids, except where two scores are as good as equal."""
    from minivllm.kernels.sampling import sample

    numbers = batch(rows, logits.device, first)
    got = sample(logits, numbers, vocab_start)
    expected = sampling.sample(logits, numbers, vocab_start)
    different = (got != expected).nonzero().squeeze(-1)
    for row in different.tolist():
        scores = sampling.scores(logits[row : row + 1], numbers.select(different[:1] * 0 + row))[0]
        margin = scores[expected[row]] - scores[got[row]]
        assert margin < 1e-3, f"row {row}: {got[row]} for {expected[row]}, margin {margin}"
    assert len(different) <= max(len(logits) // 100, 0)


def test_philox_words_are_bit_equal(device):
    for numbers in ((0, 0, 0), (-1, 3, 2**31), (123456789012345, 1, 77)):
        seed, sample_index, position = (torch.tensor([n], device=device) for n in numbers)
        got = torch.zeros(32, dtype=torch.int64, device=device)
        _words_kernel[(1,)](got, seed, sample_index, position, 8)
        expected = philox._words(seed, sample_index, position, torch.arange(8, device=device))
        assert torch.equal(got, torch.stack(expected, dim=-1).flatten())


def test_every_mix_of_parameters(device, poisoned):
    agree(torch.randn(len(MIX), 203, device=device) * 3, MIX)


def test_ties_at_the_cuts(device, poisoned):
    agree((torch.randn(len(MIX), 150, device=device) * 2).round(), MIX, first=1)


def test_masked_logits(device, poisoned):
    logits = torch.randn(4, 150, device=device)
    logits[:, ::3] = float("-inf")
    logits[3] = float("-inf")
    agree(logits, [MIX[0], MIX[1], MIX[4], MIX[0]])


def test_greedy_takes_the_lowest_of_equals(device, poisoned):
    from minivllm.kernels.sampling import sample

    logits = torch.zeros(2, 300, device=device)
    logits[1, [70, 200, 290]] = 5.0
    assert sample(logits, batch([MIX[0]] * 2, device)).tolist() == [0, 70]


def test_a_shard_of_the_vocabulary(device, poisoned):
    from minivllm.kernels.sampling import sample

    agree(torch.randn(2, 130, device=device), MIX[:2], vocab_start=71)
    with pytest.raises(ValueError, match="whole row"):
        sample(torch.randn(1, 64, device=device), batch([MIX[2]], device), 64)


def test_float16_logits_and_extreme_temperatures(device, poisoned):
    rows = [{"temperature": 1e-4}, {"temperature": 3e38}]
    agree((torch.randn(2, 130, device=device) * 100).half(), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_a_real_vocabulary(gpu, poisoned, dtype, spread):
    for rows in (1, 8, 200):
        logits = (torch.randn(rows, 151936, device=gpu) * spread).to(dtype)
        agree(logits, (MIX * 25)[:rows], first=rows)


@pytest.mark.gpu
def test_the_distribution_of_draws(gpu):
    """20,000 draws of one row have the frequencies of its softmax, by a chi-square test."""
    from minivllm.kernels.sampling import sample

    logits = torch.randn(50, device=gpu) * 2
    draws = sample(logits.expand(20000, 50).contiguous(), batch([{}] * 20000, gpu))
    expected = logits.softmax(-1) * 20000
    chi = ((torch.bincount(draws, minlength=50) - expected) ** 2 / expected).sum()
    assert chi < 100  # 49 degrees of freedom: beyond 85 once in a thousand
