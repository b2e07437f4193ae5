"""Right in another style: one key at a time with a running maximum, no score matrix at all."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, q_start: int
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        queries = q[:, head].double()
        top = torch.full((len(q),), -torch.inf, dtype=torch.float64)
        total = torch.zeros(len(q), dtype=torch.float64)
        mixed = torch.zeros(q.shape[0], q.shape[2], dtype=torch.float64)
        for j in range(min(k.shape[0], q_start + len(q))):
            rows = slice(max(j - q_start, 0), None)  # the queries that may see key j
            score = queries[rows] @ k[j, head // group].double() * scale
            new_top = torch.maximum(top[rows], score)
            shrink, share = (top[rows] - new_top).exp(), (score - new_top).exp()
            total[rows] = total[rows] * shrink + share
            mixed[rows] = mixed[rows] * shrink[:, None] + share[:, None] * v[j, head // group]
            top[rows] = new_top
        out[:, head] = (mixed / total[:, None]).to(q.dtype)
    return out
