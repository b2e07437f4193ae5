"""Writing keys and values into the paged cache, in Triton: one program a token and KV head.

Owns the kernel of `ops/kv.py`, and the 8-bit store of `ops/kv_fp8.py` that the other kernels share.
Lesson 13.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.kernels.runtime import begin, check_device, check_inner, overlaps, padded

FP8_MAX = tl.constexpr(448.0)  # the largest number of e4m3


@triton.jit
def store_row(p_cache, p_scale, row, b_x, o_d, m_d, DIM: tl.constexpr, FP8: tl.constexpr):
    """Write a head at row `row` of [N S Hkv, D]; as e4m3 with a scale in an 8-bit cache."""
    if FP8:
        b_x32 = b_x.to(tl.float32)
        largest = tl.max(tl.abs(b_x32), axis=0)
        # A row of zeros keeps a scale that can be divided by.
        scale = tl.where(largest > 0, largest / FP8_MAX, 1.0)
        tl.store(p_scale + row, scale)
        b_x = tl.div_rn(b_x32, scale + tl.zeros_like(b_x32)).to(p_cache.dtype.element_ty)
    tl.store(p_cache + row * DIM + o_d, b_x, mask=m_d)


@triton.jit
def _store_kv_kernel(
    p_k,
    p_v,
    p_k_cache,
    p_v_cache,
    p_k_scale,
    p_v_scale,
    p_slots,
    stride_k,
    stride_v,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """cache[slot[t], h] = x[t, h] for k and v; nothing where slot[t] is -1"""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(p_slots + token)
    if slot < 0:
        return
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    # 64 bits: a cache of 100 GB has more elements than an int32 can count.
    row = slot.to(tl.int64) * HEADS + head
    # [D], [D]
    b_k = tl.load(p_k + token * stride_k + head * DIM + o_d, mask=m_d, other=0.0)
    b_v = tl.load(p_v + token * stride_v + head * DIM + o_d, mask=m_d, other=0.0)
    store_row(p_k_cache, p_k_scale, row, b_k, o_d, m_d, DIM, FP8)
    store_row(p_v_cache, p_v_scale, row, b_v, o_d, m_d, DIM, FP8)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """See `ops.kv.store_kv`. k, v: [T, Hkv, D], rows may be strided; caches: [N, S, Hkv, D].

    k_scale, v_scale: [N, S, Hkv] float32, for a float8_e4m3fn cache.
    """
    check_device("store_kv", k, v, k_cache, v_cache, slot_mapping)
    check_inner("store_kv", k, 2)
    check_inner("store_kv", v, 2)
    tokens, heads, dim = k.shape
    pdl = overlaps(k.device, tokens)
    if tokens:
        _store_kv_kernel[(tokens, heads)](
            k,
            v,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            slot_mapping,
            k.stride(0),
            v.stride(0),
            heads,
            dim,
            padded(dim),
            k_scale is not None,
            pdl,
            launch_pdl=pdl,
            num_warps=1,
        )
