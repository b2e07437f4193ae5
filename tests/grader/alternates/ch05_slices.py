"""Right in another style: index arithmetic, one head at a time, a table of all places."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from minivllm.course.given import ModelConfig


class DecoderLayer:
    def __init__(self, config: ModelConfig, index: int, weights: dict[str, torch.Tensor]) -> None:
        self.config, self.index, self.weights = config, index, weights

    def tensor(self, name: str) -> torch.Tensor | None:
        return self.weights.get(f"model.layers.{self.index}.{name}")

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("ti,oi->to", x, self.tensor(f"{name}.weight"))
        bias = self.tensor(f"{name}.bias")
        return y if bias is None else y + bias

    def heads(self, flat: torch.Tensor, weight: str | None, ops: Any) -> torch.Tensor:
        rows = torch.stack(flat.split(self.config.head_dim, dim=-1), dim=1)
        if weight is None or not self.config.qk_norm:
            return rows
        # A head at a time, contiguous and alone.
        norm = [
            ops.rms_norm(rows[:, i].contiguous(), self.tensor(weight), self.config.rms_norm_eps)
            for i in range(rows.shape[1])
        ]
        return torch.stack(norm, dim=1)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        cos, sin = rope
        q_end = self.config.q_size
        k_end = q_end + self.config.kv_size
        stream = x.clone()
        eps = self.config.rms_norm_eps
        normed = ops.rms_norm(stream, self.tensor("input_layernorm.weight"), eps)
        flat = self.product("self_attn.qkv_proj", normed)
        q = self.heads(flat[:, :q_end], "self_attn.q_norm.weight", ops)
        k = self.heads(flat[:, q_end:k_end], "self_attn.k_norm.weight", ops)
        v = self.heads(flat[:, k_end:], None, ops)
        q = ops.apply_rope(q, positions, cos, sin)
        k = ops.apply_rope(k, positions, cos, sin)
        out = attend(self.index, q, k, v)
        stream += self.product("self_attn.o_proj", out.reshape(len(x), -1))  # a copy of its own
        normed = ops.rms_norm(stream, self.tensor("post_attention_layernorm.weight"), eps)
        both = self.product("mlp.gate_up_proj", normed)
        middle = both.shape[-1] // 2
        gate = both[:, :middle]
        hidden = gate / (1 + torch.exp(-gate)) * both[:, middle:]
        stream += self.product("mlp.down_proj", hidden)
        return stream


def load_weights(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    # Every published name and the window that it fills, before the file is looked at.
    places: dict[str, torch.Tensor] = {}
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for name, tensor in weights.items():
        pieces = name.split(".")
        module = pieces[-2] if len(pieces) > 1 else ""
        if module not in parts:
            places[name] = tensor
            continue
        windows = tensor.split(sizes[module])
        for part, window in zip(parts[module], windows, strict=True):
            places[".".join([*pieces[:-2], part, pieces[-1]])] = window
    leftover = set()
    for name, tensor in tensors:
        if name in places:
            places[name][...] = tensor
        else:
            leftover.add(name)
    return leftover
