"""Chapter 02: RMSNorm (30 minutes, 5 points).

Normalise each token's vector, and fuse the residual add into the same pass.
Replace each `raise NotImplementedError`, then run:
    pytest exercises/test_ch02_rmsnorm.py
Stuck? minivllm course hint ch02.1
To look around: minivllm course try ch02
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of `x` to root mean square 1, then multiply it by `weight`.

    x: [..., H] float32, float16 or bfloat16; weight: [H] in x.dtype; eps: a small float.
    Returns [..., H] in x.dtype:  x / sqrt(mean(x * x) + eps) * weight, the mean over the last axis.

    The statistics are computed in float32 whatever x.dtype is. The inputs are left as they were.

    Not allowed: torch.rms_norm, torch.nn.functional.rms_norm, torch.nn.RMSNorm.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), eps=0.0)
        tensor([[ 0.8485, 11.3137]])
    """
    # TODO(ch02.1): divide each row by the root of its mean square plus eps, then scale by weight
    raise NotImplementedError("ch02.1: rms_norm")


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a sublayer's output to the residual stream and normalise the sum.

    x, residual: [..., H] of one dtype; weight: [H] in the same dtype; eps: a small float.
    Returns (y, new_residual), both [..., H] in x.dtype:
      new_residual = x + residual, not normalised: it is what the next sublayer adds to;
      y = rms_norm(new_residual, weight, eps).

    The inputs are left as they were.

    Not allowed: torch.rms_norm, torch.nn.functional.rms_norm, torch.nn.RMSNorm.

    Example:
        >>> y, residual = add_rms_norm(torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 0.0]]),
        ...                            torch.tensor([1.0, 10.0]), eps=0.0)
        >>> y
        tensor([[ 0.8485, 11.3137]])
        >>> residual
        tensor([[3., 4.]])
    """
    # TODO(ch02.2): add x to the residual, normalise the sum, return both
    raise NotImplementedError("ch02.2: add_rms_norm")
