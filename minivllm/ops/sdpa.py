"""Attention for the CPU through torch's scaled_dot_product_attention: no score matrix in memory.

Owns the faster CPU forms of `prefill_attention` and `paged_decode`; same signatures, same results
within float32 rounding. Never used where a student's unit takes the place. Lesson 09.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values behind each row's table, each [Hkv, length, D]: views of one copy for all.

    One index_select a layer and cache, which copies whole blocks; indexing row by row costs four
    times that in calls alone, and a padded copy up to twice the bytes where the lengths differ.
    """
    block_size = k_cache.shape[1]
    needed = (context_lens + block_size - 1) // block_size  # [B]
    columns = torch.arange(block_tables.shape[1])
    blocks = block_tables[columns < needed[:, None]]  # the rows' blocks, one row after the other
    sizes, lengths = (needed * block_size).tolist(), context_lens.tolist()
    keys, values = (
        cache.index_select(0, blocks).flatten(0, 1).split(sizes)  # [blocks * S, Hkv, D] a row
        for cache in (k_cache, v_cache)
    )
    return [
        (k[:length].transpose(0, 1), v[:length].transpose(0, 1))
        for k, v, length in zip(keys, values, lengths, strict=True)
    ]


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    scale: float,
) -> torch.Tensor:
    """See `compose.compose_prefill_attention`. q: [T, Hq, D] -> [T, Hq, D]."""
    out = torch.empty_like(q)
    bounds = cu_seqlens_q.tolist()
    for row, (k, v) in enumerate(_gather(k_cache, v_cache, block_tables, context_lens)):
        start, end, length = bounds[row], bounds[row + 1], k.shape[1]
        # torch's is_causal aligns its mask top left: right only where no context precedes q.
        whole = end - start == length
        mask = None if whole else _causal_mask(end - start, length, q.device)
        result = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1).unsqueeze(0),  # [1, Hq, Tq, D]
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = result[0].transpose(0, 1)
    return out


def _causal_mask(num_queries: int, length: int, device: torch.device) -> torch.Tensor:
    """True where a query may look, aligned at the bottom right: [Tq, Tk]."""
    query = torch.arange(length - num_queries, length, device=device)
    return torch.arange(length, device=device)[None, :] <= query[:, None]


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `attention.paged_decode`. q: [B, Hq, D] -> [B, Hq, D]."""
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    out = torch.zeros_like(q)
    # [B, Hkv, G, D]: the query heads of one KV head are the rows of one small matrix product.
    grouped = (q * scale).view(rows, kv_heads, heads // kv_heads, head_dim)
    for row, (k, v) in enumerate(_gather(k_cache, v_cache, block_tables, context_lens)):
        if k.shape[1] > 0:  # else a pad row, and its zeros are right
            scores = torch.bmm(grouped[row], k.transpose(1, 2)).float()  # [Hkv, G, length]
            attended = torch.bmm(scores.softmax(-1).to(q.dtype), v)  # [Hkv, G, D]
            out[row] = attended.view(heads, head_dim)
    return out
