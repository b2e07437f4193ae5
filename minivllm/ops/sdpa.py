"""Attention for the CPU through torch's scaled_dot_product_attention: no score matrix in memory.

Owns the faster CPU forms of `prefill_attention` and `paged_decode`; same signatures, same results
within float32 rounding. Never used where a student's unit takes the place. Lesson 09.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _gather(
    cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> list[torch.Tensor]:
    """The tokens behind each row's table, each [Hkv, length, D]: views of one copy for all rows.

    One index_select a layer, which copies whole blocks; indexing row by row costs four times that
    in calls alone, and a padded copy up to twice the bytes where the lengths differ.
    """
    block_size = cache.shape[1]
    needed = (context_lens + block_size - 1) // block_size  # [B]
    columns = torch.arange(block_tables.shape[1])
    blocks = block_tables[columns < needed[:, None]]  # the rows' blocks, one row after the other
    tokens = cache.index_select(0, blocks).flatten(0, 1)  # [sum of needed * S, Hkv, D]
    rows = tokens.split((needed * block_size).tolist())
    return [
        row[:length].transpose(0, 1)
        for row, length in zip(rows, context_lens.tolist(), strict=True)
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
    keys = _gather(k_cache, block_tables, context_lens)
    values = _gather(v_cache, block_tables, context_lens)
    bounds = cu_seqlens_q.tolist()
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
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
    keys = _gather(k_cache, block_tables, context_lens)
    values = _gather(v_cache, block_tables, context_lens)
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        if k.shape[1] > 0:  # else a pad row, and its zeros are right
            scores = torch.bmm(grouped[row], k.transpose(1, 2)).float()  # [Hkv, G, length]
            attended = torch.bmm(scores.softmax(-1).to(q.dtype), v)  # [Hkv, G, D]
            out[row] = attended.view(heads, head_dim)
    return out
