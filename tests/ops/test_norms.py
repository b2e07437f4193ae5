"""RMSNorm against float64 arithmetic written out, and its dtype rules."""

from __future__ import annotations

import pytest
import torch

from minivllm.ops.norms import add_rms_norm, rms_norm


def expected(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula, in float64: x / sqrt(mean(x^2) + eps) * weight."""
    x, weight = x.double(), weight.double()
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (2, 3, 16), (0, 8), (111, 63)])
def test_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    for eps in (1e-6, 1e-5, 0.5):
        y = rms_norm(x, weight, eps)
        torch.testing.assert_close(y.double(), expected(x, weight, eps), atol=1e-5, rtol=1e-5)


def test_transformers_agrees() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm = Qwen3RMSNorm(48, eps=1e-5).to(dtype)
        norm.weight.data.normal_(1, 0.2)
        x = torch.randn(9, 48).to(dtype)
        assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_use_float32_statistics(dtype: torch.dtype) -> None:
    """300 squared is beyond float16: the mean of squares must not be computed in it."""
    x = torch.full((2, 32), 300.0, dtype=dtype)
    x[1, ::2] = -300
    y = rms_norm(x, torch.ones(32, dtype=dtype), 1e-6)
    assert y.dtype == dtype
    torch.testing.assert_close(y, x / 300, atol=0, rtol=1e-2)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_is_the_norm_of_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, residual = (torch.randn(7, 24).to(dtype) for _ in range(2))
    weight = torch.randn(24).to(dtype)
    before = x.clone(), residual.clone()
    y, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual) and total.dtype == dtype
    assert torch.equal(y, rms_norm(x + residual, weight, 1e-6))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])  # inputs are kept
