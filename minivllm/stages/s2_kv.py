"""Stage 2: keys and values are kept, so that each token goes through the model once.

Owns a contiguous cache for one sequence and the loop over it. Never shares or pages: the whole
length is reserved at the start, used or not, which is what lesson 08 sets out to mend. Lesson 06.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


class KVCache:
    """Keys and values of one sequence, layer by layer: [L, max_len, Hkv, D] each."""

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
        shape = (num_layers, max_len, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_layers  # tokens stored; a layer is ahead of the next within a step

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new tokens behind the old ones. k, v: [T, Hkv, D]; ValueError beyond max_len."""
        start = self.lengths[layer]
        end = start + k.shape[0]
        if end > self.max_len:
            raise ValueError(f"{end} tokens do not fit in a cache of {self.max_len}")
        self.k[layer, start:end] = k
        self.v[layer, start:end] = v
        self.lengths[layer] = end

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer has stored: k, v, each [length, Hkv, D], without a copy."""
        end = self.lengths[layer]
        return self.k[layer, :end], self.v[layer, :end]

    def reset(self) -> None:
        """Forget the sequence. Nothing is erased: what lies behind a length is never read."""
        self.lengths = [0] * len(self.lengths)


def generate_cached(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    """`generate_naive`'s tokens, each computed once: the prompt first, then one token a call.

    model: (ids [1, T] int64, cache) -> logits [1, T, V]; it appends to the cache. The cache is
    emptied first, so that one cache serves request after request. `ids` is left as it was.
    """
    cache.reset()
    new: list[int] = []
    step = list(ids)  # prefill: the whole prompt in one call
    while len(new) < max_new:
        logits = model(torch.tensor([step]), cache)
        new.append(int(logits[0, -1].argmax()))
        if new[-1] in eos_ids:
            break
        step = new[-1:]  # decode: everything before it is in the cache
    return new
