"""The product with a weight matrix: plain, and over weights packed for the CPU.

Owns the two forms and the packing. Never knows which layer it serves. Lesson 05.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# The row count that oneDNN optimises the layout for. Measured for 2 to 2,048 rows on a 576 x 3072
# weight: 64 is best or within noise everywhere, 1 is the worst choice for all but one row.
PACK_ROWS = 64


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [T, in], weight: [out, in], bias: [out] or None -> [T, out]."""
    return F.linear(x, weight, bias)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """The weight as `linear` wants it: unchanged."""
    return weight


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` over a weight from `onednn_pack_weight`.

    The usual product of a few rows spends half its time rearranging the weight, at every call. On
    one core (AVX-512) 16 rows x [3072, 576] take 1,250 us plain and 690 us packed, where reading
    the weight alone takes 590.
    """
    if weight.layout is not torch._mkldnn:  # a type that oneDNN does not pack
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a float32 weight in oneDNN's blocked layout; other types as they are."""
    if weight.dtype is not torch.float32 or weight.device.type != "cpu":
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)


def onednn_available() -> bool:
    """True where this torch has the operators (they are the ones torch.compile uses on a CPU)."""
    operators = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
