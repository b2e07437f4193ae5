"""Right in another style: flat storage with index_copy_, the prefill apart from the decode loop."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


class KVCache:
    def __init__(
        self,
        num_layers: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_len = max_len
        self.k = torch.empty(num_layers * max_len, num_kv_heads, head_dim, dtype=dtype)
        self.v = torch.empty(num_layers * max_len, num_kv_heads, head_dim, dtype=dtype)
        self.lengths = [0] * num_layers

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        first = self.lengths[layer]
        if self.max_len - first < k.size(0):
            raise ValueError("the cache is full")
        slots = torch.arange(first, first + k.size(0)) + layer * self.max_len
        self.k.index_copy_(0, slots, k)
        self.v.index_copy_(0, slots, v)
        self.lengths[layer] = first + k.size(0)

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = layer * self.max_len
        stop = start + self.lengths[layer]
        return self.k[start:stop], self.v[start:stop]

    def reset(self) -> None:
        for layer in range(len(self.lengths)):
            self.lengths[layer] = 0


def generate_cached(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    if max_new == 0:
        return []
    cache.reset()
    ends = frozenset(eos_ids)
    logits = model(torch.tensor(ids).unsqueeze(0), cache)
    out = [logits[0, -1].argmax().tolist()]
    while len(out) < max_new and out[-1] not in ends:
        logits = model(torch.full((1, 1), out[-1]), cache)
        out.append(logits[0, 0].argmax().tolist())
    return out
