"""Solution of chapter 03, RoPE. The reasons stand in ch03_rope.md.

Generated from minivllm/ops/rope.py by `python -m minivllm.course build`:
edit there, not here.
"""

from __future__ import annotations

import torch


def rope_table(head_dim: int, max_position: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position's angles (Su et al., 2021, section 3.2.2).

    Pair i turns by position * theta ** (-2 i / D). Returns (cos, sin), each [P, D/2] float32.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse_frequency = 1.0 / theta**exponent  # [D/2]
    # float32 throughout: bfloat16 has 8 bits of mantissa and cannot even count to 300.
    angle = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequency)
    return angle.cos(), angle.sin()


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotate each head of `x` by its token's position.

    x: [T, H, D], positions: [T], cos and sin: [P, D/2] -> [T, H, D] in x.dtype.
    The pairs are (i, i + D/2), the "half split" of the Hugging Face checkpoints; the paper pairs
    neighbours (2i, 2i + 1). With the wrong pairing the text stays fluent and is wrong.
    """
    c = cos[positions].unsqueeze(1)  # [T, 1, D/2]
    s = sin[positions].unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    return rotated.to(x.dtype)
