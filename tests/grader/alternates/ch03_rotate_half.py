"""Right in another style: rows of double width and a rotated copy, as transformers writes it."""

from __future__ import annotations

import torch


def rope_table(head_dim: int, max_position: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = torch.pow(theta, -torch.arange(head_dim // 2).double() * 2 / head_dim)
    angle = torch.einsum("p,i->pi", torch.arange(max_position).double(), inverse)
    return torch.cos(angle).to(torch.float32), torch.sin(angle).to(torch.float32)


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    wide_cos = torch.cat((cos, cos), dim=-1)[positions][:, None]  # [T, 1, D]
    wide_sin = torch.cat((sin, sin), dim=-1)[positions][:, None]
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1).float()  # the second half comes first
    swapped[..., : x.shape[-1] // 2].neg_()
    return (x * wide_cos + swapped * wide_sin).to(x.dtype)
