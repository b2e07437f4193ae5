"""Right in another style: pairs as complex numbers, the table from Python floats."""

from __future__ import annotations

import math

import torch


def rope_table(head_dim: int, max_position: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = torch.empty(2, max_position, head_dim // 2)
    for position in range(max_position):
        for pair in range(head_dim // 2):
            angle = position * math.exp(-2 * pair / head_dim * math.log(theta))
            cos[position, pair], sin[position, pair] = math.cos(angle), math.sin(angle)
    return cos, sin


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    turn = torch.complex(cos, sin).index_select(0, positions)[:, None, :]
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((pairs.real, pairs.imag), dim=-1).to(x.dtype)
