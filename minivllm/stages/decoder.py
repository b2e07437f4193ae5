"""A decoder without an engine: one sequence, plain weights, units passed in.

Owns the layer that students write and the loader that fills it. Never pages, batches or fuses; the
engine's decoder (`models/decoder.py`) is tied to this one by a test of their logits. Lesson 05.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from minivllm.config import ModelConfig

# Checkpoint module -> (packed module of the layer, its part). One product instead of three.
PACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def part_sizes(config: ModelConfig) -> dict[str, list[int]]:
    """Rows of each part of the packed matrices, in their order."""
    return {
        "qkv_proj": [config.q_size, config.kv_size, config.kv_size],
        "gate_up_proj": [config.intermediate_size, config.intermediate_size],
    }


def load_weights(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    """Copy checkpoint tensors into `weights`; returns the names that found no place.

    weights: name -> allocated tensor, with packed modules ("model.layers.0.self_attn.qkv_proj
    .weight"); tensors: (name, tensor) as published, q, k, v, gate and up apart; sizes: packed
    module -> rows of its parts.
    """
    unused: set[str] = set()
    for name, tensor in tensors:
        prefix, module, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", name, "")
        packed, part = PACKED.get(module, (None, 0))
        if packed is None:
            target = weights.get(name)
        else:
            target = weights.get(f"{prefix}.{packed}.{kind}")
            if target is not None:  # the part's rows of the packed matrix
                start = sum(sizes[packed][:part])
                target = target[start : start + sizes[packed][part]]
        if target is None:
            unused.add(name)
        else:
            target.copy_(tensor)
    return unused


class DecoderLayer:
    """One layer. `ops` brings the units of earlier chapters: rms_norm, apply_rope, attention."""

    def __init__(self, config: ModelConfig, index: int, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.index = index
        prefix = f"model.layers.{index}."
        self.w = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: SimpleNamespace,
        cache: Any = None,
    ) -> torch.Tensor:
        """x: [T, H] at `positions` [T]; rope: (cos, sin) [P, D/2] -> [T, H].

        With a cache, its earlier keys and values come before this call's.
        """
        c, w = self.config, self.w
        h = ops.rms_norm(x, w["input_layernorm"], c.rms_norm_eps)
        qkv = F.linear(h, w["self_attn.qkv_proj"], w.get("self_attn.qkv_proj.bias"))
        q, k, v = qkv.split([c.q_size, c.kv_size, c.kv_size], dim=-1)
        q = q.view(-1, c.num_heads, c.head_dim)  # [T, Hq, D]
        k = k.view(-1, c.num_kv_heads, c.head_dim)
        v = v.view(-1, c.num_kv_heads, c.head_dim)
        if c.qk_norm:  # Qwen3: each head is normalised before it is rotated
            q = ops.rms_norm(q, w["self_attn.q_norm"], c.rms_norm_eps)
            k = ops.rms_norm(k, w["self_attn.k_norm"], c.rms_norm_eps)
        q, k = ops.apply_rope(q, positions, *rope), ops.apply_rope(k, positions, *rope)
        if cache is not None:  # rotated keys are kept: a position never changes
            cache.append(self.index, k, v)
            k, v = cache.view(self.index)
        attended = ops.attention(q, k, v, c.head_dim**-0.5, k.shape[0] - q.shape[0])
        x = x + F.linear(attended.flatten(1), w["self_attn.o_proj"], w.get("self_attn.o_proj.bias"))
        h = ops.rms_norm(x, w["post_attention_layernorm"], c.rms_norm_eps)
        gate, up = F.linear(h, w["mlp.gate_up_proj"]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, w["mlp.down_proj"])
