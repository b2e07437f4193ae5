"""RMSNorm kernels against `ops.norms`."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HALF_TYPES, close

from minivllm.ops import norms


def kernels():
    from minivllm.kernels import norms as triton_norms

    return triton_norms


def check(device, dtype, shape):
    x = torch.randn(shape, dtype=dtype, device=device) * 3
    residual = torch.randn(shape, dtype=dtype, device=device)
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    close(kernels().rms_norm(x, weight, 1e-6), norms.rms_norm(x, weight, 1e-6), dtype)
    got = kernels().add_rms_norm(x, residual, weight, 1e-6)
    expected = norms.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(got[1], expected[1])
    close(got[0], expected[0], dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", [(3, 48), (2, 63), (2, 2, 16)])
def test_equal_the_torch_form(device, poisoned, dtype, shape):
    check(device, dtype, shape)


def test_rows_of_a_packed_tensor(device, poisoned):
    packed = torch.randn(3, 80, device=device)
    x, weight = packed[:, 16:64], torch.randn(48, device=device)
    close(kernels().rms_norm(x, weight, 1e-6), norms.rms_norm(x, weight, 1e-6), x.dtype)


def test_large_float16_values_do_not_overflow(device, poisoned):
    x = torch.full((1, 32), 3e4, dtype=torch.float16, device=device)
    weight = torch.ones(32, dtype=torch.float16, device=device)
    close(kernels().rms_norm(x, weight, 1e-6), torch.ones_like(x), torch.float16)


def test_no_rows(device):
    x = torch.randn(0, 32, device=device)
    assert kernels().rms_norm(x, torch.ones(32, device=device), 1e-6).shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [576, 1024, 4096, 5120, 12288])
def test_shapes_of_models(gpu, dtype, size):
    check(gpu, dtype, (111, size))
