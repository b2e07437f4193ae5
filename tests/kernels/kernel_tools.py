"""What the kernel tests share: where they run, poisoned outputs, and a paged cache with guards.

A kernel runs on a GPU, or in Triton's interpreter. TRITON_INTERPRET must be set before anything
imports triton, and an out-of-bounds store can take the process with it: `test_interpreted.py` runs
this folder in a child process. In the parent, without a GPU, the tests here are skipped.
"""

from __future__ import annotations

import os

import pytest
import torch

GUARD = 64  # elements in front of and behind every output
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF_TYPES = [torch.float32, torch.float16]  # the interpreter has no bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def device():
    """Where kernels run; skips where they can not."""
    pytest.importorskip("triton")
    if INTERPRETED:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    pytest.skip("no CUDA device; test_interpreted.py runs this file in a child process")


@pytest.fixture
def gpu(device):
    """A real card, for the full matrix of shapes."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty gives NaN between guards; at the end of the test the guards must be untouched."""
    real, made = torch.empty, []

    def empty(*shape, dtype=torch.float32, device="cpu", **options):
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        size = int(torch.Size(shape).numel())
        buffer = torch.full((size + 2 * GUARD,), _poison(dtype), dtype=dtype, device=device)
        made.append(buffer)
        return buffer[GUARD : GUARD + size].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    monkeypatch.setattr(torch, "empty", real)
    for buffer in made:
        for guard in (buffer[:GUARD], buffer[-GUARD:]):
            assert _is_poison(guard), "a kernel wrote outside its output"


def _poison(dtype):
    return float("nan") if dtype.is_floating_point else -77


def _is_poison(tensor):
    return bool(tensor.isnan().all() if tensor.dtype.is_floating_point else (tensor == -77).all())


def paged(lengths, *, dim, kv_heads, block_size, dtype, device, spare=2):
    """A cache [N, S, Hkv, D] with NaN wherever no token is, shuffled tables, and the lengths."""
    needed = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(needed) + spare).tolist()
    tables = torch.full((len(lengths), max(max(needed), 1) + 1), -1, dtype=torch.int32)
    shape = (sum(needed) + spare, block_size, kv_heads, dim)
    k_cache = torch.full(shape, float("nan"))
    v_cache = torch.full(shape, float("nan"))
    for row, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(length):
            slot = blocks[position // block_size], position % block_size
            k_cache[slot] = torch.randn(kv_heads, dim)
            v_cache[slot] = torch.randn(kv_heads, dim)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return (
        k_cache.to(device, dtype),
        v_cache.to(device, dtype),
        tables.to(device),
        lens.to(device),
    )


def close(got, expected, dtype):
    """Equal within what the type's rounding allows, and no NaN anywhere."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert not got.isnan().any()
    torch.testing.assert_close(
        got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def close_8_bit(got, expected):
    """Equal e4m3 numbers, but for a last bit here and there on a GPU.

    Triton's interpreter forgets to carry: a number just below a power of two becomes half of it,
    and it rounds ties its own way.
    """
    got, expected = got.float(), expected.float()
    different = got != expected
    if INTERPRETED:
        power_of_two = torch.frexp(expected.abs()).mantissa == 0.5
        halved = power_of_two & (got * 2 == expected)
        subnormal = expected.abs() <= 2**-6  # the same fault, seen from below
        tie = (got - expected).abs() <= expected.abs() * 0.15
        wrong = different & ~(halved | subnormal | tie)
        assert not wrong.any(), (got[wrong], expected[wrong])
    else:
        assert different.float().mean() < 2e-3
        torch.testing.assert_close(got, expected, rtol=0.15, atol=2**-8)
