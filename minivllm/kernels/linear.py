"""The product of a few rows with a weight matrix, in Triton: little more than the weight's bytes.

Owns the kernels of `ops.linear.linear` for small T, and when they are taken. cuBLAS is tuned for
large T: on an H200 the four products of a Qwen3-0.6B layer take it 30, 24 and 24 us for 1, 16 and
64 rows, and the kernels here 13, 18 and 21, where the bytes need 7. Never used in float32.
Lesson 13.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minivllm.kernels.runtime import begin, check_device, overlaps, padded

MOST_ROWS = 64  # beyond, cuBLAS is as fast or faster: 28 us for a layer's four products at 256 rows
MOST_FEATURES = 16384  # the output head has tiles enough for cuBLAS to be near the bytes' limit
BLOCK_N = 32


@triton.jit
def _gemv_kernel(
    p_x,
    p_w,
    p_bias,
    p_out,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[n] = sum_k x[k] w[n, k] + bias[n]: one row, on the plain arithmetic units"""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):  # unrolled: all loads leave before the first use
        o_k = first + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        # [N, K]
        o_w = o_n.to(tl.int64)[:, None] * K + o_k[None, :]
        b_w = tl.load(p_w + o_w, mask=m_n[:, None] & m_k[None, :], other=0.0)
        if first == 0:
            begin(PDL)  # weights depend on no other kernel: their loads are on the way already
        # [K]
        b_x = tl.load(p_x + o_k, mask=m_k, other=0.0)
        b_acc += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    b_out = tl.sum(b_acc, axis=1)
    if BIAS:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    p_x,
    p_w,
    p_bias,
    p_out,
    p_partial,
    p_counter,
    M,
    N,
    stride_x,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[m, n] = sum_k x[m, k] w[n, k] + bias[n]

    With SPLIT_K > 1 a program sums a part of k; the last of a tile to finish adds up all parts.
    """
    begin(PDL)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    PART: tl.constexpr = K // SPLIT_K
    o_k = split * PART + tl.arange(0, BLOCK_K)
    # Rows beyond the end are read as other rows, and never stored: cheaper than a mask.
    p_x_tile = p_x + (o_m % M).to(tl.int64)[:, None] * stride_x + o_k[None, :]
    p_w_tile = p_w + (o_n % N).to(tl.int64)[:, None] * K + o_k[None, :]
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, PART, BLOCK_K):
        # [M, K], [N, K]
        b_x = tl.load(p_x_tile + first)
        b_w = tl.load(p_w_tile + first)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
    m_n = o_n < N
    m_out = (o_m < M)[:, None] & m_n[None, :]
    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    if SPLIT_K > 1:
        size = M.to(tl.int64) * N
        tl.store(p_partial + split * size + o_out, b_acc, mask=m_out)
        # All of the program's stores come before its count, and the count before the last one's
        # loads. The last one also leaves the counter as it was found.
        tl.debug_barrier()
        p_tile = p_counter + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(p_tile, 1, sem="acq_rel") < SPLIT_K - 1:
            return
        tl.store(p_tile, 0)
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in tl.static_range(SPLIT_K):  # in order, so that the sum is always the same
            b_acc += tl.load(
                p_partial + part * size + o_out, mask=m_out, other=0.0, cache_modifier=".cg"
            )
    if BIAS:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    tl.store(p_out + o_out, b_acc.to(p_out.dtype.element_ty), mask=m_out)


def launch_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block_n: int,
    block_k: int,
    num_warps: int,
    pdl: bool | None = None,
) -> torch.Tensor:
    """x: [1, K], weight: [N, K] -> [1, N], by the kernel for one row."""
    check_device("linear", x, weight)
    pdl = overlaps(x.device) if pdl is None else pdl
    features, size = weight.shape
    out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    _gemv_kernel[(triton.cdiv(features, block_n),)](
        x, weight, bias, out, features, size, block_n, block_k, bias is not None, pdl,
        num_warps=num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    block: tuple[int, int, int],
    split_k: int,
    counter: torch.Tensor | None,
    num_warps: int,
    num_stages: int,
    pdl: bool | None = None,
) -> torch.Tensor:
    """x: [M, K], weight: [N, K] -> [M, N]. K is a multiple of block[2] * split_k.

    counter: int32 zeros, one a tile at least, for this weight and stream alone.
    """
    check_device("linear", x, weight)
    pdl = overlaps(x.device) if pdl is None else pdl
    rows, size = x.shape
    features = weight.shape[0]
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    partial = None
    if split_k > 1:
        partial = torch.empty(split_k, rows, features, dtype=torch.float32, device=x.device)
    block_m, block_n, block_k = block
    grid = (triton.cdiv(features, block_n), triton.cdiv(rows, block_m), split_k)
    _linear_kernel[grid](
        x, weight, bias, out, partial, counter, rows, features, x.stride(0),
        size, block_m, block_n, block_k, split_k, bias is not None, pdl,
        num_warps=num_warps, num_stages=num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.linear.linear`. x: [T, in], weight: [out, in] -> [T, out].

    Takes the kernels here where they beat cuBLAS, by T and the weight's shape alone.
    """
    rows, (features, size) = len(x), weight.shape
    # Whole tiles only, and 16-bit numbers: everything else is cuBLAS's.
    if not 1 <= rows <= MOST_ROWS or size % 128 or x.dtype.itemsize != 2 or not x.is_cuda:
        return F.linear(x, weight, bias)
    if rows == 1:
        block_k = min(padded(size), 2048)
        return launch_gemv(x.contiguous(), weight, bias, 4096 // block_k, block_k, 4)
    tiles = triton.cdiv(features, BLOCK_N)
    split_k = split_of(features, size)
    counter = getattr(weight, "split_counter", None)
    if features > MOST_FEATURES or x.stride(1) != 1 or (split_k > 1 and counter is None):
        return F.linear(x, weight, bias)
    block_m = max(16, padded(rows))
    # Deep stages while every program has a multiprocessor to itself; two share one otherwise.
    stages = 6 if tiles * split_k <= 132 else 4
    return launch_linear(x, weight, bias, (block_m, BLOCK_N, 128), split_k, counter, 4, stages)


def split_of(features: int, size: int) -> int:
    """Parts of k: four where the tiles of the output alone would leave most of the card idle."""
    return 4 if features <= 64 * BLOCK_N and size % 512 == 0 else 1


def prepare_weight(weight: torch.Tensor) -> torch.Tensor:
    """The table's `pack_weight`: the weight itself, with the counters of a split sum attached.

    They belong to the weight, so that no two engines, and no two layers, ever share them.
    """
    if weight.is_cuda and split_of(*weight.shape) > 1:
        tiles = triton.cdiv(weight.shape[0], BLOCK_N)
        weight.split_counter = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
    return weight
