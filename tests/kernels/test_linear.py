"""The product of few rows against float64."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HALF_TYPES


def right(got, x, weight, bias):
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert not got.isnan().any()
    error = (got.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[x.dtype]


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("split_k", [1, 2])
def test_few_rows(device, poisoned, dtype, split_k):
    from minivllm.kernels.linear import launch_linear

    x = torch.randn(5, 64, dtype=dtype, device=device)
    weight, bias = torch.randn(40, 64, dtype=dtype, device=device), torch.randn(40, device=device)
    counter = torch.zeros(3, dtype=torch.int32, device=device)
    for _ in range(2):  # the first launch leaves the counters as it found them
        got = launch_linear(x, weight, bias, (16, 16, 16), split_k, counter, 4, 1)
        right(got, x, weight, bias)
    assert not counter.any()


def test_one_row(device, poisoned):
    from minivllm.kernels.linear import launch_gemv

    x, weight = torch.randn(1, 48, device=device), torch.randn(20, 48, device=device)
    right(launch_gemv(x, weight, None, 8, 32, 4), x, weight, None)


def test_elsewhere_it_is_torch(device):
    from minivllm.kernels.linear import linear

    x, weight = torch.randn(2, 48, device=device), torch.randn(20, 48, device=device)
    assert torch.equal(linear(x, weight, None), torch.nn.functional.linear(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65])
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (1024, 2048), (1024, 3072), (960, 576), (152, 128)]
)
def test_shapes_of_models(gpu, dtype, rows, shape):
    from minivllm.kernels.linear import linear, prepare_weight

    x = torch.randn(rows, shape[1], dtype=dtype, device=gpu)
    weight = prepare_weight(torch.randn(shape, dtype=dtype, device=gpu))
    bias = torch.randn(shape[0], dtype=dtype, device=gpu)
    for _ in range(3):
        right(linear(x, weight, bias), x, weight, bias)
        right(linear(x, weight, None), x, weight, None)
