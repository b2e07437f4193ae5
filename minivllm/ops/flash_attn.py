"""Attention by the `flash_attn` package, where it is installed (Dao, 2023).

Owns the two calls into it and what it needs: both walk the paged cache through block tables, as our
kernels do. Never imported by default: `auto` stays with our own, which are faster. Lesson 13 shows
what happens inside.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F

CAPABILITY = (8, 0)  # Ampere: the oldest that flash-attn 2 has kernels for
LARGEST_HEAD = 256


def obstacle(device: str, capability: tuple[int, int] | None) -> str | None:
    """Why it cannot run on such a device, or None. Looks for the package without importing it."""
    if device != "cuda" or (capability or (0, 0)) < CAPABILITY:
        found = f"{device} {capability}" if capability else device
        return f"needs a GPU of compute capability {CAPABILITY} or higher; the device is {found}"
    if importlib.util.find_spec("flash_attn") is None:
        return "needs the package flash-attn, which is not installed"
    return None


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
    from flash_attn import flash_attn_varlen_func

    # With a block table the bounds of the keys say how long each row is, not where it lies.
    cu_seqlens_k = F.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))  # [B + 1]
    return flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        # A bound is enough, and the longest row itself would be a wait for the device.
        max_seqlen_k=block_tables.shape[1] * k_cache.shape[1],
        softmax_scale=scale,
        # Aligned at the bottom right: the last query sees all keys, a chunk's too.
        causal=True,
        block_table=block_tables,
    )


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `attention.paged_decode`. q: [B, Hq, D] -> [B, Hq, D].

    A row of length 0 has no tile of keys: the kernel then writes zeros and reads no table entry.
    """
    from flash_attn import flash_attn_with_kvcache

    out = flash_attn_with_kvcache(
        q.unsqueeze(1),  # [B, 1, Hq, D]
        k_cache,
        v_cache,
        cache_seqlens=context_lens,
        softmax_scale=scale,
        causal=True,
        block_table=block_tables,
    )
    return out.squeeze(1)
