"""Solution of chapter 05, The model. The reasons stand in ch05_model.md.

Generated from minivllm/stages/decoder.py by `python -m minivllm.course build`:
edit there, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from minivllm.course.given import ModelConfig

# Checkpoint module -> (packed module of the layer, its part). One product instead of three.
PACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class DecoderLayer:
    """One layer of the model.

    w: name -> tensor, without the layer's prefix: "input_layernorm.weight" [H],
    "self_attn.qkv_proj.weight" [Hq*D + 2*Hkv*D, H], "self_attn.q_norm.weight" [D] (Qwen3 only), ...
    """

    def __init__(self, config: ModelConfig, index: int, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.index = index
        # The dot keeps layer 1 from taking the tensors of layer 10.
        prefix = f"model.layers.{index}."
        self.w = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]: the product with `name`.weight, plus its bias where it has one."""
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        ops: Any,
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """The residual stream x [T, H] at `positions` [T], after this layer: [T, H].

        rope: (cos, sin); ops: rms_norm and apply_rope; attend(index, q, k, v) -> [T, Hq, D] reads
        and, in later stages, stores keys and values.
        """
        c, w = self.config, self.w
        h = ops.rms_norm(x, w["input_layernorm.weight"], c.rms_norm_eps)
        qkv = self.linear("self_attn.qkv_proj", h)
        q, k, v = qkv.split([c.q_size, c.kv_size, c.kv_size], dim=-1)
        q = q.unflatten(-1, (c.num_heads, c.head_dim))  # [T, Hq, D]
        k = k.unflatten(-1, (c.num_kv_heads, c.head_dim))  # [T, Hkv, D]
        v = v.unflatten(-1, (c.num_kv_heads, c.head_dim))
        if c.qk_norm:  # Qwen3: each head is normalised before it is rotated
            q = ops.rms_norm(q, w["self_attn.q_norm.weight"], c.rms_norm_eps)
            k = ops.rms_norm(k, w["self_attn.k_norm.weight"], c.rms_norm_eps)
        q, k = ops.apply_rope(q, positions, *rope), ops.apply_rope(k, positions, *rope)
        attended = attend(self.index, q, k, v)
        # Each half adds to the plain stream: what is normalised is only what the half reads.
        x = x + self.linear("self_attn.o_proj", attended.flatten(1))
        h = ops.rms_norm(x, w["post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = self.linear("mlp.gate_up_proj", h).chunk(2, dim=-1)
        return x + self.linear("mlp.down_proj", F.silu(gate) * up)


def load_weights(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    """Copy checkpoint tensors to their places; returns the names that have none.

    weights: name -> allocated tensor, q, k, v and gate, up packed; tensors: (name, tensor) as
    published, apart; sizes: packed module -> rows of each of its parts.
    """
    unused: set[str] = set()
    for name, tensor in tensors:
        # Split at dots and compared whole: "up_proj" is also how "gate_up_proj" ends.
        stem, _, kind = name.rpartition(".")  # "model.layers.0.mlp.up_proj", "weight"
        prefix, dot, module = stem.rpartition(".")
        packed, part = PACKED.get(module, (module, None))
        target = weights.get(f"{prefix}{dot}{packed}.{kind}")
        if target is None:
            unused.add(name)  # the caller judges: a tied model's head is fine, a lost layer is not
            continue
        if part is not None:
            start = sum(sizes[packed][:part])
            target = target[start : start + sizes[packed][part]]
        target.copy_(tensor)  # in place: the layers hold these very tensors
    return unused
