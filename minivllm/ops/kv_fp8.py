"""The 8-bit KV cache in plain torch: e4m3 numbers, with one scale for each token and KV head.

Owns the arithmetic of `kv_cache_dtype="fp8"`: half the bytes of bfloat16, paid for with 4 bits of
mantissa instead of 8. The forms here are the specification of the kernels' 8-bit paths, on any
device. Never used unless asked for: it changes results. Lesson 16.
"""

from __future__ import annotations

import torch

from minivllm.ops.attention import attention

FP8_MAX = 448.0  # the largest number of e4m3


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each head of each token to 8 bits. [..., D] -> ([..., D] e4m3, scales [...] float32).

    The scale maps the head's largest magnitude to the largest number of the type.
    """
    x32 = x.float()
    largest = x32.abs().amax(dim=-1)
    # Zeros keep a scale that can be divided by.
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (x32 / scale[..., None]).to(torch.float8_e4m3fn), scale


def dequantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[..., D] e4m3, [...] -> [..., D] float32."""
    return x.float() * scale[..., None]


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """`ops.kv.store_kv` into an 8-bit cache. k_scale, v_scale: [N, S, Hkv] float32."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for x, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        numbers, scale = quantize(x[kept])
        # As bytes: indexed writes are not built for 8-bit floats on every device.
        cache.view(torch.uint8).flatten(0, 1)[slots] = numbers.view(torch.uint8)
        scales.flatten(0, 1)[slots] = scale


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> torch.Tensor:
    """`ops.attention.paged_decode` over an 8-bit cache. q: [B, Hq, D] -> [B, Hq, D]."""
    out = torch.zeros_like(q)
    for row, length in enumerate(context_lens.tolist()):
        if length:
            k = _gather(k_cache, k_scale, block_tables[row], length)
            v = _gather(v_cache, v_scale, block_tables[row], length)
            out[row] = attention(q[row : row + 1], k, v, scale, length - 1)[0]
    return out


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> torch.Tensor:
    """`prefill_attention` over an 8-bit cache. q: [T, Hq, D] -> [T, Hq, D].

    The step's own keys and values are read back in 8 bits too: a prompt's numbers then do not
    depend on how it was cut into chunks.
    """
    out = torch.empty_like(q)
    bounds = cu_seqlens_q.tolist()
    for row, length in enumerate(context_lens.tolist()):
        start, end = bounds[row], bounds[row + 1]
        k = _gather(k_cache, k_scale, block_tables[row], length)
        v = _gather(v_cache, v_scale, block_tables[row], length)
        out[start:end] = attention(q[start:end], k, v, scale, length - (end - start))
    return out


def _gather(
    cache: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, length: int
) -> torch.Tensor:
    """The first `length` tokens behind a block table, as float32: [length, Hkv, D]."""
    blocks = table[: -(-length // cache.shape[1])].long()
    numbers = cache.view(torch.uint8)[blocks].view(torch.float8_e4m3fn)
    return dequantize(numbers, scales[blocks]).flatten(0, 1)[:length]
