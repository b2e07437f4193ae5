"""Per-head norm of q and k, rotation, and the cache's store, in one Triton kernel.

Owns the fused form of `ops.compose.compose_qk_norm_rope_store`: one program takes a token's KV
head together with the query heads that read it. Unfused, q and k make three round trips through
memory, in six launches or more. Lesson 13.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.kernels.kv import store_row
from minivllm.kernels.runtime import begin, check_device, check_inner, overlaps, padded


@triton.jit
def _norm_rope(
    p_x,
    m_head,
    p_weight,
    eps,
    p_cos,
    p_sin,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):
    """HEADS heads from p_x on: [HEADS, D], normalised and rotated, in the model's type."""
    HALF: tl.constexpr = DIM // 2
    o_d = tl.arange(0, BLOCK_D)
    # Element i turns together with i + D/2: both are loaded in the same layout, so that no value
    # has to move between lanes. The second read comes out of the L1 cache.
    o_pair = tl.where(o_d < HALF, o_d + HALF, o_d - HALF)
    o_angle = tl.where(o_d < HALF, o_d, o_d - HALF)
    m_d = o_d < DIM
    o_head = tl.arange(0, HEADS)[:, None] * DIM
    m_x = m_head[:, None] & m_d[None, :]
    # [HEADS, D], [HEADS, D]
    b_x = tl.load(p_x + o_head + o_d[None, :], mask=m_x, other=0.0)
    dtype = b_x.dtype
    b_x = b_x.to(tl.float32)
    b_pair = tl.load(p_x + o_head + o_pair[None, :], mask=m_x, other=0.0).to(tl.float32)
    if NORM:
        # [D], [D]
        b_w = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_w_pair = tl.load(p_weight + o_pair, mask=m_d, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(b_x * b_x, axis=1) / DIM + eps)
        # Rounded to the model's type where torch rounds: before the weight and after it.
        b_x = (b_x * inverse[:, None]).to(dtype).to(tl.float32) * b_w[None, :]
        b_pair = (b_pair * inverse[:, None]).to(dtype).to(tl.float32) * b_w_pair[None, :]
        b_x, b_pair = b_x.to(dtype).to(tl.float32), b_pair.to(dtype).to(tl.float32)
    # [D], [D]
    b_cos = tl.load(p_cos + o_angle, mask=m_d, other=0.0)
    b_sin = tl.load(p_sin + o_angle, mask=m_d, other=0.0)
    b_sin = tl.where(o_d < HALF, -b_sin, b_sin)
    return (b_x * b_cos[None, :] + b_pair * b_sin[None, :]).to(dtype)


@triton.jit
def _qk_norm_rope_store_kernel(
    p_q,
    p_k,
    p_v,
    p_q_weight,
    p_k_weight,
    eps,
    p_positions,
    p_cos,
    p_sin,
    p_k_cache,
    p_v_cache,
    p_k_scale,
    p_v_scale,
    p_slots,
    p_out,
    stride_q,
    stride_k,
    stride_v,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = rope(norm(q[t]));  k_cache[slot[t]] = rope(norm(k[t]));  v_cache[slot[t]] = v[t]"""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(p_positions + token)
    p_cos += position * (DIM // 2)
    p_sin += position * (DIM // 2)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM

    o_group = tl.arange(0, GROUP_PAD)
    m_group = o_group < GROUP
    # [GROUP, D]
    b_q = _norm_rope(
        p_q + token * stride_q + head * GROUP * DIM,
        m_group, p_q_weight, eps, p_cos, p_sin, DIM, GROUP_PAD, BLOCK_D, NORM,
    )  # fmt: skip
    p_row = p_out + (token * KV_HEADS + head) * GROUP * DIM
    o_row = o_group[:, None] * DIM + o_d[None, :]
    tl.store(p_row + o_row, b_q, mask=m_group[:, None] & m_d[None, :])

    slot = tl.load(p_slots + token)
    if slot < 0:  # a pad row of a captured graph
        return
    # [1, D]
    b_k = _norm_rope(
        p_k + token * stride_k + head * DIM,
        tl.arange(0, 1) < 1, p_k_weight, eps, p_cos, p_sin, DIM, 1, BLOCK_D, NORM,
    )  # fmt: skip
    # [D]
    b_v = tl.load(p_v + token * stride_v + head * DIM + o_d, mask=m_d, other=0.0)
    row = slot.to(tl.int64) * KV_HEADS + head
    store_row(p_k_cache, p_k_scale, row, tl.reshape(b_k, (BLOCK_D,)), o_d, m_d, DIM, FP8)
    store_row(p_v_cache, p_v_scale, row, b_v, o_d, m_d, DIM, FP8)


def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.compose`. q: [T, Hq, D], k, v: [T, Hkv, D], views of packed rows -> [T, Hq, D].

    k_scale, v_scale: [N, S, Hkv] float32, for a float8_e4m3fn cache.
    """
    check_device("qk_norm_rope_store", q, k, v, k_cache, v_cache)
    for tensor in (q, k, v):
        check_inner("qk_norm_rope_store", tensor, 2)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pdl = overlaps(q.device, tokens)
    if tokens:
        _qk_norm_rope_store_kernel[(tokens, kv_heads)](
            q, k, v, q_weight, k_weight, eps, positions, cos, sin,
            k_cache, v_cache, k_scale, v_scale, slot_mapping, out,
            q.stride(0), k.stride(0), v.stride(0),
            kv_heads, heads // kv_heads, padded(heads // kv_heads), dim, padded(dim),
            q_weight is not None, k_scale is not None, pdl,
            launch_pdl=pdl, num_warps=1,
        )  # fmt: skip
    return out
