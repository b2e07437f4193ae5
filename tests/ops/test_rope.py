"""RoPE against complex float64 rotations, and the property that makes it work."""

from __future__ import annotations

import cmath

import pytest
import torch

from minivllm.ops.rope import apply_rope, rope_table


def expected(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Pair (i, i + D/2) as a complex number, turned by position * theta^(-2i/D)."""
    out = torch.empty_like(x, dtype=torch.float64)
    half = x.shape[-1] // 2
    for token, position in enumerate(positions.tolist()):
        for head in range(x.shape[1]):
            for pair in range(half):
                turn = cmath.exp(1j * position * theta ** (-2 * pair / x.shape[-1]))
                turned = complex(x[token, head, pair], x[token, head, pair + half]) * turn
                out[token, head, pair] = turned.real
                out[token, head, pair + half] = turned.imag
    return out


@pytest.mark.parametrize("head_dim", [2, 6, 16, 64])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_rotation(head_dim: int, theta: float) -> None:
    torch.manual_seed(0)
    cos, sin = rope_table(head_dim, 40, theta)
    assert cos.shape == sin.shape == (40, head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    positions = torch.tensor([0, 39, 3, 3, 17])
    x = torch.randn(5, 3, head_dim)
    y = apply_rope(x, positions, cos, sin)
    torch.testing.assert_close(y.double(), expected(x, positions, theta), atol=2e-5, rtol=0)
    assert torch.equal(y[0], x[0])  # position 0 is not turned


def test_far_positions_keep_their_precision() -> None:
    cos, sin = rope_table(128, 40960, 1e6)
    positions = torch.arange(40960, dtype=torch.float64)
    for pair in (0, 1, 31, 63):
        angle = positions * 1e6 ** (-2 * pair / 128)
        # float32 holds the angle 40959.0 to 2e-3; the fastest pair is exact.
        torch.testing.assert_close(cos[:, pair].double(), angle.cos(), atol=4e-3, rtol=0)
        torch.testing.assert_close(sin[:, pair].double(), angle.sin(), atol=4e-3, rtol=0)


def test_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(1)
    cos, sin = rope_table(32, 200, 10000.0)
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def score(at_q: int, at_k: int) -> float:
        turned_q = apply_rope(q, torch.tensor([at_q]), cos, sin)
        turned_k = apply_rope(k, torch.tensor([at_k]), cos, sin)
        return float((turned_q * turned_k).sum())

    assert score(10, 3) == pytest.approx(score(107, 100), abs=1e-4)
    assert abs(score(10, 3) - score(10, 4)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rotated_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    cos, sin = rope_table(16, 300, 10000.0)
    x, positions = torch.randn(4, 2, 16).to(dtype), torch.tensor([0, 257, 258, 299])
    y = apply_rope(x, positions, cos, sin)
    assert y.dtype == dtype
    assert torch.equal(y, apply_rope(x.float(), positions, cos, sin).to(dtype))
    assert not torch.equal(y[1], y[2])


def test_no_tokens() -> None:
    cos, sin = rope_table(8, 4, 10000.0)
    empty = apply_rope(torch.empty(0, 2, 8), torch.empty(0, dtype=torch.int64), cos, sin)
    assert empty.shape == (0, 2, 8)
