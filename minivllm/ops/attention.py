"""Causal grouped-query attention: one sequence, and one token a row through block tables.

Owns the plain torch forms, with float32 scores: the specification that every faster form is
compared with. Never writes the cache. Lessons 04 (attention) and 09 (paged_decode).
"""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, q_start: int
) -> torch.Tensor:
    """Attention of one sequence's queries over its keys (Vaswani et al., 2017; GQA: Ainslie, 2023).

    q: [Tq, Hq, D] at positions q_start..q_start+Tq-1; k, v: [Tk, Hkv, D] at positions 0..Tk-1;
    Hq is a multiple of Hkv -> [Tq, Hq, D] in q.dtype.
    """
    group = q.shape[1] // k.shape[1]
    # Query head h reads KV head h // group, so each KV head is repeated next to itself.
    k = k.float().repeat_interleave(group, dim=1)  # [Tk, Hq, D]
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale  # [Hq, Tq, Tk]
    q_position = torch.arange(q.shape[0], device=q.device) + q_start
    k_position = torch.arange(k.shape[0], device=q.device)
    # Positions are compared, not rows: a chunk or a cached prefix starts at q_start > 0.
    future = k_position[None, :] > q_position[:, None]  # [Tq, Tk]
    # softmax subtracts each row's maximum: exp of a score above 88 is beyond float32.
    probabilities = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, v).to(q.dtype)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One new token a row, over keys and values read through the block table.

    q: [B, Hq, D]; k_cache, v_cache: [N, S, Hkv, D]; block_tables: [B, M] int32, -1 pads;
    context_lens: [B] int32, the new token included -> [B, Hq, D]. A pad row has length 0: it
    reads nothing and yields zeros.
    """
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        blocks = block_tables[row, : -(-length // block_size)].long()
        # The last block is cut at the length: what lies behind it belongs to nobody, or to NaN.
        k = k_cache[blocks].flatten(0, 1)[:length]  # [length, Hkv, D]
        v = v_cache[blocks].flatten(0, 1)[:length]
        out[row] = attention(q[row : row + 1], k, v, scale, length - 1)[0]
    return out
