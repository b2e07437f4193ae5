"""RMSNorm, alone and fused with the residual add that precedes it.

Owns the two norms of every decoder layer in plain torch. Never keeps state: weights come in as
arguments. Lesson 02 explains why the statistics are float32 and what the fusion saves.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of `x` to root mean square 1, then by `weight` (Zhang and Sennrich, 2019).

    x: [..., H], weight: [H] -> [..., H] in x.dtype.
    """
    # The mean of squares must be float32: in float16 a row value above 256 squares to infinity.
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    # Back to the model's type before the weight, in the order the checkpoints were trained with.
    return (x32 * inverse_rms).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a sublayer's output to the residual stream and normalise the sum.

    x, residual: [..., H], weight: [H] -> (normalised sum, sum), both [..., H] in x.dtype.
    One fused pass reads x and residual once; add and norm apart read the sum a second time.
    """
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
