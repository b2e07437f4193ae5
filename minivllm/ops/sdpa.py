"""Attention for the CPU through torch's scaled_dot_product_attention: no score matrix in memory.

Owns the faster CPU forms of `prefill_attention` and `paged_decode`; same signatures, same results
within float32 rounding. Never used where a student's unit takes the place. Lesson 09.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _gather(cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
    """First `length` tokens behind a table as [1, Hkv, length, D], a view where that is possible.

    The free list hands out neighbouring ids, so most tables are one run of blocks: slicing it
    copies nothing, where an index copies the whole context in every layer of every step.
    """
    first, count = table[0], len(table)
    if table == list(range(first, first + count)):
        blocks = cache[first : first + count]
    else:
        blocks = cache[torch.tensor(table)]
    return blocks.flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)


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
    block_size = k_cache.shape[1]
    tables, bounds = block_tables.tolist(), cu_seqlens_q.tolist()
    for row, length in enumerate(context_lens.tolist()):
        start, end = bounds[row], bounds[row + 1]
        table = tables[row][: -(-length // block_size)]
        queries = q[start:end].transpose(0, 1).unsqueeze(0)  # [1, Hq, Tq, D]
        k, v = _gather(k_cache, table, length), _gather(v_cache, table, length)
        # torch's is_causal aligns its mask top left: right only where no context precedes q.
        whole = end - start == length
        mask = None if whole else _causal_mask(end - start, length, q.device)
        result = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
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
    kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    out = torch.zeros_like(q)
    # [B, Hkv, G, D]: the query heads of one KV head are the rows of one small matrix product.
    grouped = (q * scale).view(rows, kv_heads, heads // kv_heads, head_dim)
    tables = block_tables.tolist()
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        table = tables[row][: -(-length // block_size)]
        k, v = _gather(k_cache, table, length), _gather(v_cache, table, length)
        scores = grouped[row] @ k[0].transpose(1, 2)  # [Hkv, G, length]
        out[row] = (scores.float().softmax(-1).to(q.dtype) @ v[0]).reshape(heads, head_dim)
    return out
