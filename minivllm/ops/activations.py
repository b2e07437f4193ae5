"""The gated activation between an MLP's two projections.

Owns silu(gate) * up in plain torch. Never sees weights. Lesson 05.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product (Shazeer, 2020). gate_up: [T, 2 I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
