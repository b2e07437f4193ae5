"""The gated activation against its formula."""

from __future__ import annotations

import pytest
import torch

from minivllm.ops.activations import silu_mul


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (0, 8), (111, 126)])
def test_formula(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * 4
    half = shape[1] // 2
    gate, up = x[:, :half].double(), x[:, half:].double()
    y = silu_mul(x)
    assert y.shape == (shape[0], half)
    torch.testing.assert_close(y.double(), gate / (1 + (-gate).exp()) * up, atol=1e-5, rtol=1e-5)


def test_the_gate_comes_first() -> None:
    assert silu_mul(torch.tensor([[0.0, 5.0]])).item() == 0.0
    assert silu_mul(torch.tensor([[5.0, 0.0]])).item() == 0.0
    assert silu_mul(torch.tensor([[-50.0, 3.0]])).item() == pytest.approx(0.0, abs=1e-18)
    assert silu_mul(torch.tensor([[50.0, 3.0]])).item() == pytest.approx(150.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    assert silu_mul(torch.ones(2, 6, dtype=dtype)).dtype == dtype
