"""RMSNorm, alone and fused with the residual add, in Triton: one program a row.

Owns the kernels of `ops/norms.py`. A row is read once and stays in registers between the sum of
squares and the scaling, where the torch form passes over it five times. Lesson 13.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.kernels.runtime import begin, check_device, overlaps, padded


@triton.jit
def _rms_norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_sum,
    stride_x,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """sum = x + residual                         (ADD only; stored, the next layer's residual)
    y = sum / sqrt(mean(sum^2) + eps) * weight
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < SIZE
    # [H]
    b_x = tl.load(p_x + row * stride_x + o_h, mask=m_h, other=0.0)
    if ADD:
        # [H]; the sum is rounded to the model's type before it is normalised, as in torch.
        b_residual = tl.load(p_residual + row * SIZE + o_h, mask=m_h, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(b_x.dtype)
        tl.store(p_sum + row * SIZE + o_h, b_x, mask=m_h)
    b_x32 = b_x.to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(b_x32 * b_x32, axis=0) / SIZE + eps)
    # [H]
    b_weight = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_y = (b_x32 * inverse_rms).to(b_x.dtype).to(tl.float32) * b_weight
    tl.store(p_out + row * SIZE + o_h, b_y.to(b_x.dtype), mask=m_h)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.norms.rms_norm`. x: [..., H], weight: [H] -> [..., H]."""
    out, _ = _launch(x, None, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.norms.add_rms_norm`. x, residual: [..., H] -> (normalised sum, sum)."""
    out, total = _launch(x, residual.contiguous(), weight, eps)
    assert total is not None
    return out, total


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_device("rms_norm", x, residual, weight)
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    # A view of packed columns has a row stride of its own; more irregular ones are copied.
    rows = x if x.ndim == 2 and x.stride(1) == 1 else x.contiguous().view(-1, size)
    if rows.shape[0]:
        block, pdl = padded(size), overlaps(x.device, rows.shape[0])
        # 4 warps up to 4096 elements: 8 bytes a lane and turn; more warps only wait longer for
        # each other in the sum.
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            residual,
            weight,
            out,
            total,
            rows.stride(0),
            eps,
            size,
            block,
            residual is not None,
            pdl,
            launch_pdl=pdl,
            num_warps=min(max(block // 1024, 4 if block >= 512 else 1), 16),
        )
    return out, total
