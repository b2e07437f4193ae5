"""A checkpoint as a function from ids to logits, for the stages before the engine.

Owns allocation and the order of embedding, layers, norm and head. Never batches: one sequence at a
time. It keeps a log of its calls, which is what the lessons count and plot. Lessons 01, 05, 06.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minivllm.config import ModelConfig
from minivllm.layers.rotary import build_rope_table
from minivllm.models.loader import iterate_tensors
from minivllm.stages.decoder import part_sizes
from minivllm.stages.s2_kv import KVCache


class Call(NamedTuple):
    """One call of the model: when it began (seconds, monotonic) and the tokens that it computed."""

    started: float
    num_tokens: int


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor under the name that the decoder reads, packed modules packed."""
    hidden, head_dim = config.hidden_size, config.head_dim
    sizes = {name: sum(parts) for name, parts in part_sizes(config).items()}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.qkv_proj.weight": (sizes["qkv_proj"], hidden),
        "self_attn.o_proj.weight": (hidden, config.q_size),
        "mlp.gate_up_proj.weight": (sizes["gate_up_proj"], hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    if config.qkv_bias:
        layer["self_attn.qkv_proj.bias"] = (sizes["qkv_proj"],)
    if config.o_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        layer["mlp.gate_up_proj.bias"] = (sizes["gate_up_proj"],)
        layer["mlp.down_proj.bias"] = (hidden,)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


class PlainModel:
    """Logits of one sequence, with the units it is given.

    units: rms_norm, rope_table, apply_rope, attention, DecoderLayer, load_weights, KVCache.
    load_format: "auto" for the checkpoint's weights, "dummy" for seeded random ones (a directory
    with config.json alone is enough then). ValueError where load_weights left something unfilled.
    """

    def __init__(
        self,
        path: Path,
        max_position: int,
        units: SimpleNamespace,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        load_format: str = "auto",
    ) -> None:
        self.config = ModelConfig.from_dir(path)
        self.units = units
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.max_position = max_position
        # NaN: a tensor that the loader missed shows at once, instead of looking like a bad model.
        self.weights = {
            name: torch.full(shape, float("nan"), dtype=dtype, device=self.device)
            for name, shape in weight_shapes(self.config).items()
        }
        # Before loading, so that a loader which puts new tensors in place of these is found out.
        self.layers = [
            units.DecoderLayer(self.config, index, self.weights)
            for index in range(self.config.num_layers)
        ]
        allocated = dict(self.weights)
        self.unused: set[str] = set()
        if load_format == "dummy":
            fill_randomly(self.weights)
        else:
            self.unused = units.load_weights(
                self.weights, iterate_tensors(path), part_sizes(self.config)
            )
        missing = [name for name, tensor in allocated.items() if tensor.isnan().any()]
        if missing:
            raise ValueError(f"load_weights left {len(missing)} tensors unfilled: {missing[:4]}")
        cos, sin = build_rope_table(
            self.config.rope, self.config.head_dim, max_position, units.rope_table
        )
        self.rope = cos.to(self.device), sin.to(self.device)
        self.calls: list[Call] = []

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """ids: [1, T] -> float32 logits [1, T, V]; with a cache, ids follow what it holds."""
        self.calls.append(Call(time.perf_counter(), ids.shape[1]))
        start = 0 if cache is None else cache.lengths[0]
        end = start + ids.shape[1]
        if end > self.max_position:
            raise ValueError(f"{end} tokens exceed max_len={self.max_position} of this stage")
        positions = torch.arange(start, end, device=self.device)
        x = self.weights["model.embed_tokens.weight"][ids[0].to(self.device)]  # [T, H]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Rotated keys are kept as they are: a token's position never changes.
            if cache is not None:
                cache.append(layer, k, v)
                k, v = cache.view(layer)
            return self.units.attention(q, k, v, self.config.head_dim**-0.5, start)

        for layer in self.layers:
            x = layer.forward(x, positions, self.rope, self.units, attend)
        x = self.units.rms_norm(x, self.weights["model.norm.weight"], self.config.rms_norm_eps)
        # A tied model has no head of its own: the embedding serves twice.
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return F.linear(x, head).float().unsqueeze(0)

    @property
    def tokens_computed(self) -> int:
        """Tokens that have gone through the layers since the log was last cleared."""
        return sum(call.num_tokens for call in self.calls)

    def new_cache(self, max_len: int) -> KVCache:
        """An empty cache of this model's shape, in its dtype and on its device."""
        c = self.config
        return self.units.KVCache(
            c.num_layers, max_len, c.num_kv_heads, c.head_dim, self.dtype, self.device
        )


def fill_randomly(weights: dict[str, torch.Tensor], seed: int = 0) -> None:
    """Seeded weights of a size that keeps activations near 1; norms ones, biases zeros."""
    generator = torch.Generator(device=next(iter(weights.values())).device).manual_seed(seed)
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
