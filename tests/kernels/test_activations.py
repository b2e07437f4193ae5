"""The SiLU kernel against `ops.activations`."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HALF_TYPES, close

from minivllm.ops import activations


def check(device, dtype, rows, size):
    from minivllm.kernels.activations import silu_mul

    x = torch.randn(rows, 2 * size, dtype=dtype, device=device) * 4
    close(silu_mul(x), activations.silu_mul(x), dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("rows", "size"), [(3, 40), (1, 1100), (0, 16)])
def test_equals_the_torch_form(device, poisoned, dtype, rows, size):
    check(device, dtype, rows, size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1536, 3072, 12288])
def test_shapes_of_models(gpu, dtype, size):
    check(gpu, dtype, 111, size)
