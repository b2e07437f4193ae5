"""Right in another style: heads before positions in memory, one tensor for both, a for loop."""

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
        self.lengths = [0] * num_layers
        shape = (num_layers, 2, num_kv_heads, max_len, head_dim)
        self.both = torch.empty(shape, dtype=dtype, device=device)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        used, count = self.lengths[layer], len(k)
        if used + count > self.max_len:
            raise ValueError(f"no room for {count} tokens behind {used} of {self.max_len}")
        window = self.both[layer].narrow(2, used, count)
        window.copy_(torch.stack([k, v]).transpose(1, 2))
        self.lengths[layer] += count

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.both[layer, :, :, : self.lengths[layer]].transpose(1, 2).unbind(0)
        return k, v

    def reset(self) -> None:
        self.lengths = [0 for _ in self.lengths]


def generate_cached(
    model: Callable[[torch.Tensor, KVCache], torch.Tensor],
    cache: KVCache,
    ids: list[int],
    max_new: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    cache.reset()
    text: list[int] = []
    rows = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1)
    for _ in range(max_new):
        token = model(rows, cache)[:, -1].argmax(dim=-1, keepdim=True)  # [1, 1]
        text.append(token.item())
        if text[-1] in eos_ids:
            return text
        rows = token
    return text
