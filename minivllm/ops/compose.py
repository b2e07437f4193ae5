"""The engine's operations composed from the units students write.

Owns the plain composition that every backend falls back to: q/k-norm + RoPE + KV store, and
prefill attention as a loop over sequences. Never has arithmetic of its own. Lessons 02 to 09.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def compose_qk_norm_rope_store(
    rms_norm: Callable[..., torch.Tensor],
    apply_rope: Callable[..., torch.Tensor],
    store_kv: Callable[..., None],
) -> Callable[..., torch.Tensor]:
    """Build `qk_norm_rope_store` out of its three units."""

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
        *scales: torch.Tensor,
    ) -> torch.Tensor:
        """q: [T, Hq, D], k and v: [T, Hkv, D] -> rotated q; k (rotated) and v go to the cache.

        scales: none, or the two scale tensors of an 8-bit cache, handed on to `store_kv`.
        """
        if q_weight is not None:  # Qwen3 normalises each head before it is rotated
            q = rms_norm(q, q_weight, eps)
            k = rms_norm(k, k_weight, eps)
        q = apply_rope(q, positions, cos, sin)
        # v is never rotated: position decides who is looked at, not what is read.
        rotated = apply_rope(k, positions, cos, sin)
        store_kv(rotated, v, k_cache, v_cache, slot_mapping, *scales)
        return q

    return qk_norm_rope_store


def compose_prefill_attention(
    attention: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Build `prefill_attention` as a loop of `attention` over the sequences of a step."""

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
        """q: [T, Hq, D] packed by cu_seqlens_q [B + 1] -> [T, Hq, D].

        Keys and values are read back from the cache, the step's own included: whole prompts,
        later chunks and prompts with a cached prefix are then one and the same case.
        """
        out = torch.empty_like(q)
        block_size = k_cache.shape[1]
        bounds = cu_seqlens_q.tolist()
        for row, length in enumerate(context_lens.tolist()):
            start, end = bounds[row], bounds[row + 1]
            blocks = block_tables[row, : -(-length // block_size)].long()
            k = k_cache[blocks].flatten(0, 1)[:length]  # [length, Hkv, D]
            v = v_cache[blocks].flatten(0, 1)[:length]
            out[start:end] = attention(q[start:end], k, v, scale, length - (end - start))
        return out

    return prefill_attention
