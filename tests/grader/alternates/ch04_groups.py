"""Right in another style: no head is repeated, query heads get an axis for their group."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, q_start: int
) -> torch.Tensor:
    tq, hq, d = q.shape
    tk, hkv, _ = k.shape
    grouped = q.to(torch.float32).reshape(tq, hkv, hq // hkv, d)
    scores = torch.einsum("ignd,jgd->gnij", grouped * scale, k.to(torch.float32))
    # A mask to add, made once by shape: 0 up to the query's own position, -inf behind it.
    mask = torch.full((tq, tk), -torch.inf).triu(diagonal=q_start + 1)
    scores = scores + mask
    shares = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    shares /= shares.sum(dim=-1, keepdim=True)
    return torch.einsum("gnij,jgd->ignd", shares, v.float()).reshape(tq, hq, d).to(q.dtype)
