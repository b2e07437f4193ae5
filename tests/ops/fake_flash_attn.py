"""A `flash_attn` package for machines without one: its two paged functions, in plain torch.

Same argument names, and it refuses what flash-attn 2 refuses. It is written from that package's
documentation, not from our own forms: gathers by page, masks at the bottom right.
"""

from __future__ import annotations

import math
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, *counts: torch.Tensor
) -> None:
    if k.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == table.stride(-1) == 1
    assert table.dtype == torch.int32 and table.dim() == 2
    for count in counts:
        assert count.dtype == torch.int32 and count.is_contiguous()


def _one_sequence(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: list[int],
    length: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """q: [Tq, Hq, D] -> [Tq, Hq, D]. No keys: zeros."""
    if length == 0:
        return torch.zeros_like(q)
    size = k_cache.shape[1]
    used = pages[: math.ceil(length / size)]
    assert min(used) >= 0, "a table entry inside the context is a page"
    k, v = (
        torch.cat([cache[page] for page in used])[:length].float() for cache in (k_cache, v_cache)
    )
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        seen = length - len(q) + row + 1 if causal else length
        for head in range(q.shape[1]):
            scores = scale * (k[:seen, head // group] @ q[row, head].float())
            out[row, head] = (scores.softmax(0) @ v[:seen, head // group]).to(q.dtype)
    return out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    block_table=None,
):
    assert block_table is not None and dropout_p == 0.0 and window_size == (-1, -1)
    _check(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    q_bounds, k_bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert len(q_bounds) == len(k_bounds) == len(block_table) + 1
    out = torch.full_like(q, math.nan)
    for row, pages in enumerate(block_table.tolist()):
        queries = slice(q_bounds[row], q_bounds[row + 1])
        length = k_bounds[row + 1] - k_bounds[row]
        assert len(q[queries]) <= max_seqlen_q and length <= max_seqlen_k
        out[queries] = _one_sequence(q[queries], k, v, pages, length, softmax_scale, causal)
    return out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    block_table=None,
):
    assert q.dim() == 4 and k is None and v is None and window_size == (-1, -1)
    _check(q, k_cache, v_cache, block_table, cache_seqlens)
    rows = zip(q, block_table.tolist(), cache_seqlens.tolist(), strict=True)
    outs = [
        _one_sequence(row, k_cache, v_cache, pages, length, softmax_scale, causal)
        for row, pages, length in rows
    ]
    return torch.stack(outs)


def module() -> ModuleType:
    """Something for `sys.modules["flash_attn"]`."""
    fake = ModuleType("flash_attn")
    fake.__spec__ = ModuleSpec("flash_attn", None)  # or `find_spec` takes it for a broken one
    fake.flash_attn_varlen_func = flash_attn_varlen_func
    fake.flash_attn_with_kvcache = flash_attn_with_kvcache
    return fake
