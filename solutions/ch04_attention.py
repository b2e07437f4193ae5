"""Solution of chapter 04, Causal GQA attention. The reasons stand in ch04_attention.md.

Generated from minivllm/ops/attention.py by `python -m minivllm.course build`:
edit there, not here.
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
