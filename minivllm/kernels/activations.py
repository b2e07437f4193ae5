"""silu(gate) * up in Triton.

Owns the kernel of `ops/activations.py`: two reads and one write, where torch's three operations
read or write nine times. Lesson 13.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.kernels.runtime import begin, check_device, overlaps, padded

BLOCK = 1024  # 16 bytes a lane with four warps and two-byte types


@triton.jit
def _silu_mul_kernel(
    p_gate_up, p_out, stride_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out = gate * sigmoid(gate) * up, where a row of gate_up is [gate | up]."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < SIZE
    # [BLOCK], [BLOCK]
    b_gate = tl.load(p_gate_up + row * stride_row + o_i, mask=m_i, other=0.0)
    b_up = tl.load(p_gate_up + row * stride_row + SIZE + o_i, mask=m_i, other=0.0)
    b_gate32 = b_gate.to(tl.float32)
    # Rounded to the model's type in between, as in torch.
    b_silu = (b_gate32 / (1.0 + tl.exp(-b_gate32))).to(b_gate.dtype)
    b_out = (b_silu.to(tl.float32) * b_up.to(tl.float32)).to(b_gate.dtype)
    tl.store(p_out + row * SIZE + o_i, b_out, mask=m_i)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.activations.silu_mul`. gate_up: [T, 2 I] -> [T, I]."""
    check_device("silu_mul", gate_up)
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(BLOCK, padded(size))
        # Rows on the first axis: the others end at 65535.
        grid = (rows, triton.cdiv(size, block))
        pdl = overlaps(out.device, rows)
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, block, pdl, launch_pdl=pdl)
    return out
