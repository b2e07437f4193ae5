"""Right in another style: helper functions, three products for one, parts collected first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from minivllm.course.given import ModelConfig

GROUPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def gated(pair: torch.Tensor) -> torch.Tensor:
    gate, up = pair.tensor_split(2, dim=-1)
    return torch.mul(gate * torch.sigmoid(gate), up)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.config = config
        self.index = index
        start = f"model.layers.{index}."
        self.w = {k[len(start) :]: v for k, v in weights.items() if k.startswith(start)}

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        return self.mlp(self.attention(x, positions, rope, ops, attend), ops)

    def attention(self, x, positions, rope, ops, attend):
        c, w = self.config, self.w
        h = ops.rms_norm(x, w["input_layernorm.weight"], c.rms_norm_eps)
        bounds = [0, c.q_size, c.q_size + c.kv_size, c.q_size + 2 * c.kv_size]
        bias = w.get("self_attn.qkv_proj.bias")
        parts = []
        for i in range(3):  # three products in place of one
            low, high = bounds[i], bounds[i + 1]
            rows = nn.functional.linear(
                h,
                w["self_attn.qkv_proj.weight"][low:high],
                None if bias is None else bias[low:high],
            )
            parts.append(rows.reshape(x.shape[0], -1, c.head_dim))
        for i, name in enumerate(("q_norm", "k_norm")):
            weight = w.get(f"self_attn.{name}.weight")
            if weight is not None:
                parts[i] = ops.rms_norm(parts[i], weight, c.rms_norm_eps)
            parts[i] = ops.apply_rope(parts[i], positions, rope[0], rope[1])
        mixed = attend(self.index, *parts).contiguous().view(x.shape[0], -1)
        return torch.add(x, mixed @ w["self_attn.o_proj.weight"].t())

    def mlp(self, x, ops):
        w = self.w
        h = ops.rms_norm(x, w["post_attention_layernorm.weight"], self.config.rms_norm_eps)
        return x + gated(h @ w["mlp.gate_up_proj.weight"].t()) @ w["mlp.down_proj.weight"].t()


def load_weights(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    whole_of = {part: whole for whole, parts in GROUPS.items() for part in parts}
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    unused = set()
    for name, tensor in tensors:
        pieces = name.split(".")
        part = pieces[-2] if len(pieces) >= 2 else ""
        if part in whole_of:
            pieces[-2] = whole_of[part]
        target = ".".join(pieces)
        if target in weights:
            found[target][part] = tensor
        else:
            unused.add(name)
    for target, parts in found.items():
        whole = target.split(".")[-2]
        if whole not in GROUPS:
            weights[target].data.copy_(next(iter(parts.values())))
            continue
        # Row by row, so that a part the file lacks leaves its rows alone.
        row = 0
        for part, height in zip(GROUPS[whole], sizes[whole]):
            if part in parts:
                weights[target].narrow(0, row, height).copy_(parts[part])
            row += height
    return unused
