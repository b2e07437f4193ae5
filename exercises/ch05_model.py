"""Chapter 05: The model (45 minutes, 7 points).

Put norm, RoPE, attention and the gated MLP together into a layer, and fill it with real weights.
Replace each `raise NotImplementedError`, then run:
    pytest exercises/test_ch05_model.py
Stuck? minivllm course hint ch05.1
To look around: minivllm course try ch05
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
        """The residual stream after this layer.

        x: [T, H] float32; positions: [T] int64; rope: (cos, sin), each [P, D/2].
        ops: earlier units: ops.rms_norm(x, weight, eps), ops.apply_rope(x, positions, cos, sin).
          Every norm and every rotation here is one of these.
        attend: attention as attend(self.index, q, k, v) -> [T, Hq, D], with q [T, Hq, D] and
          k, v [T, Hkv, D]. Call it once: later stages keep keys and values behind it.
        Returns [T, H]. x is left as it was.

        Attention half: normalise x with "input_layernorm.weight". That, through
        self.linear("self_attn.qkv_proj", .), gives q, k and v side by side, c.q_size, c.kv_size
        and c.kv_size wide (c = self.config); split each into heads of c.head_dim. If c.qk_norm,
        normalise every head of q with "self_attn.q_norm.weight" and every head of k with
        "self_attn.k_norm.weight". Rotate q and k. Attend. Put the heads side by side again, and add
        what self.linear("self_attn.o_proj", .) makes of them to x.

        MLP half: normalise the new x with "post_attention_layernorm.weight". That, through
        self.linear("mlp.gate_up_proj", .), gives gate and up side by side, equally wide. Add
        self.linear("mlp.down_proj", silu(gate) * up) to the new x.

        All weights are in self.w by these names; every norm has eps = c.rms_norm_eps.

        Example:
            >>> from types import SimpleNamespace
            >>> c = SimpleNamespace(q_size=2, kv_size=2, head_dim=2, num_heads=1, num_kv_heads=1,
            ...                     qk_norm=False, rms_norm_eps=0.0)
            >>> one, eye = torch.ones(2), torch.eye(2)
            >>> layer = DecoderLayer(c, 0, {"model.layers.0.input_layernorm.weight": one,
            ...     "model.layers.0.self_attn.qkv_proj.weight": torch.cat([eye, eye, eye]),
            ...     "model.layers.0.self_attn.o_proj.weight": eye,
            ...     "model.layers.0.post_attention_layernorm.weight": one,
            ...     "model.layers.0.mlp.gate_up_proj.weight": torch.cat([eye, eye]),
            ...     "model.layers.0.mlp.down_proj.weight": eye})
            >>> ops = SimpleNamespace(rms_norm=rms_norm, apply_rope=apply_rope)
            >>> rope = torch.ones(1, 1), torch.zeros(1, 1)  # position 0: no turn
            >>> layer.forward(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), rope, ops,
            ...               attend=lambda index, q, k, v: v)
            tensor([[4.3527, 6.0992]])
        """
        # TODO(ch05.1): attention half, then MLP half; each adds to the stream it has read
        raise NotImplementedError("ch05.1: DecoderLayer.forward")


def load_weights(
    weights: dict[str, torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    sizes: dict[str, list[int]],
) -> set[str]:
    """Copy checkpoint tensors to their places; return the names that have none.

    weights: name -> allocated tensor. The layers already hold these tensors, so write into them.
    tensors: pairs (name, tensor) as published, in any order, maybe in another dtype.
      Read once: it may be a generator.
    sizes: packed module -> rows of each of its parts: {"qkv_proj": [4, 2, 2], "gate_up_proj": ...}.
    Returns the set of names for which `weights` has no place. It is no error here: the caller knows
    whether, say, the "lm_head.weight" of a model with tied embeddings may be left over.

    A name is dotted: "model.layers.0.self_attn.k_proj.weight", with the module next to last and
    "weight" or "bias" last. If PACKED names the module, as k_proj -> ("qkv_proj", 1), the tensor is
    part 1 of "model.layers.0.self_attn.qkv_proj.weight": the rows behind those of part 0. Any other
    tensor goes to its own name.

    Example:
        >>> weights = {"a.qkv_proj.weight": torch.zeros(4, 1), "norm.weight": torch.zeros(2)}
        >>> published = [("a.k_proj.weight", torch.ones(1, 1)), ("norm.weight", torch.ones(2)),
        ...              ("rotary.inv_freq", torch.ones(3))]
        >>> load_weights(weights, published, {"qkv_proj": [2, 1, 1], "gate_up_proj": [3, 3]})
        {'rotary.inv_freq'}
        >>> weights["a.qkv_proj.weight"].flatten()
        tensor([0., 0., 1., 0.])
    """
    # TODO(ch05.2): find each tensor's place (of a packed one its part's rows), copy it there
    raise NotImplementedError("ch05.2: load_weights")
