"""A checkpoint as a function from ids to logits, for the stages before the engine.

Owns allocation and the order of embedding, layers, norm and head. Never batches: one sequence at a
time. It counts the tokens it computes, which is what the first lessons plot. Lessons 01, 05, 06.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from minivllm.config import ModelConfig
from minivllm.layers.rotary import build_rope_table
from minivllm.models.loader import iterate_tensors
from minivllm.stages.decoder import part_sizes
from minivllm.stages.s2_kv import KVCache


def empty_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Allocated tensors under the names that the decoder reads, packed modules packed."""
    hidden, head_dim = config.hidden_size, config.head_dim
    sizes = {name: sum(parts) for name, parts in part_sizes(config).items()}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = {
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
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    # NaN: a tensor that the loader missed then shows at once, instead of looking like a bad model.
    return {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}


class PlainModel:
    """Logits of one sequence, with the units it is given.

    units: rms_norm, rope_table, apply_rope, attention, DecoderLayer, load_weights.
    """

    def __init__(self, path: Path, max_position: int, units: SimpleNamespace) -> None:
        self.config = ModelConfig.from_dir(path)
        self.units = units
        self.weights = empty_weights(self.config)
        unused = units.load_weights(self.weights, iterate_tensors(path), part_sizes(self.config))
        missing = [name for name, tensor in self.weights.items() if tensor.isnan().any()]
        if missing:
            raise ValueError(f"load_weights left {len(missing)} tensors unfilled: {missing[:4]}")
        self.unused = unused
        self.layers = [
            units.DecoderLayer(self.config, index, self.weights)
            for index in range(self.config.num_layers)
        ]
        self.rope = build_rope_table(
            self.config.rope, self.config.head_dim, max_position, units.rope_table
        )
        self.tokens_computed = 0

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """ids: [1, T] -> logits [1, T, V]; with a cache, ids follow what it holds."""
        start = 0 if cache is None else cache.lengths[0]
        positions = torch.arange(start, start + ids.shape[1])
        x = self.weights["model.embed_tokens.weight"][ids[0]]  # [T, H]
        for layer in self.layers:
            x = layer.forward(x, positions, self.rope, self.units, cache)
        x = self.units.rms_norm(x, self.weights["model.norm.weight"], self.config.rms_norm_eps)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        self.tokens_computed += ids.shape[1]
        return F.linear(x, head).unsqueeze(0)

    def new_cache(self, max_len: int) -> KVCache:
        """An empty cache of this model's shape."""
        c = self.config
        return KVCache(c.num_layers, max_len, c.num_kv_heads, c.head_dim)
