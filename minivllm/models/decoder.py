"""The decoder of Qwen3, Qwen2, Llama and Mistral: one file, differing by flags of `ModelConfig`.

Owns the order of operations. Never chooses a kernel (the op table does) and never sees a sequence:
rows and caches come in as explicit arguments. Lesson 05.
"""

from __future__ import annotations

import torch
from torch import nn

from minivllm.config import ModelConfig
from minivllm.layers.linear import (
    Embedding,
    Linear,
    NormWeight,
    PackedColumnLinear,
    RowLinear,
    Shard,
)
from minivllm.layers.rotary import build_rope_table
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.table import Ops

# Keys and values of one layer, [N, S, Hkv, D] each, and the two scale tensors of an 8-bit cache.
LayerCache = tuple[torch.Tensor, ...]


class Attention(nn.Module):
    """Grouped-query attention over the paged cache of one layer."""

    def __init__(self, config: ModelConfig, ops: Ops, shard: Shard) -> None:
        super().__init__()
        self.ops = ops
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        sizes = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        self.qkv_proj = PackedColumnLinear(config.hidden_size, sizes, config.qkv_bias, shard)
        self.o_proj = RowLinear(config.q_size, config.hidden_size, config.o_bias, shard)
        self.q_norm = NormWeight(config.head_dim) if config.qk_norm else None
        self.k_norm = NormWeight(config.head_dim) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> torch.Tensor:
        """x: [T, H]; cache: k and v [N, S, Hkv, D], then the scales of an 8-bit one -> [T, H]."""
        ops, (k_cache, v_cache, *scales) = self.ops, cache
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))  # [T, heads, D]
            for part in self.qkv_proj.split(self.qkv_proj(x))
        )
        q = ops.qk_norm_rope_store(
            q,
            k,
            v,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            batch.positions,
            *rope,
            k_cache,
            v_cache,
            batch.slot_mapping,
            *scales,
        )
        return self.o_proj(self._attend(q, cache, batch).flatten(1))

    def _attend(self, q: torch.Tensor, cache: LayerCache, batch: AttentionBatch) -> torch.Tensor:
        """Decode and prefill rows have different kernels; both read the cache. -> [T, Hq, D]."""
        k_cache, v_cache, *scales = cache
        nd, tables, lens = batch.num_decode, batch.block_tables, batch.context_lens
        outs = []
        if nd > 0:
            outs.append(
                self.ops.decode_attention(
                    q[:nd], k_cache, v_cache, tables[:nd], lens[:nd], self.scale, *scales
                )
            )
        if nd < q.shape[0]:
            outs.append(
                self.ops.prefill_attention(
                    q[nd:],
                    k_cache,
                    v_cache,
                    tables[nd:],
                    lens[nd:],
                    batch.cu_seqlens_q,
                    batch.max_seqlen_q,
                    self.scale,
                    *scales,
                )
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: ModelConfig, ops: Ops, shard: Shard) -> None:
        super().__init__()
        self.ops = ops
        sizes = {"gate": config.intermediate_size, "up": config.intermediate_size}
        self.gate_up_proj = PackedColumnLinear(config.hidden_size, sizes, config.mlp_bias, shard)
        self.down_proj = RowLinear(
            config.intermediate_size, config.hidden_size, config.mlp_bias, shard
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, H] -> [T, H]."""
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm, both added to the residual stream."""

    def __init__(self, config: ModelConfig, ops: Ops, shard: Shard) -> None:
        super().__init__()
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.input_layernorm = NormWeight(config.hidden_size)
        self.self_attn = Attention(config, ops, shard)
        self.post_attention_layernorm = NormWeight(config.hidden_size)
        self.mlp = MLP(config, ops, shard)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        batch: AttentionBatch,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, H], the last sublayer's output not yet added -> (x, residual).

        The add is left to the next norm, so that the two can be one kernel.
        """
        weight = self.input_layernorm.weight
        if residual is None:
            x, residual = self.ops.rms_norm(x, weight, self.eps), x
        else:
            x, residual = self.ops.add_rms_norm(x, residual, weight, self.eps)
        x = self.self_attn(x, batch, rope, cache)
        x, residual = self.ops.add_rms_norm(
            x, residual, self.post_attention_layernorm.weight, self.eps
        )
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers, final norm: token ids to hidden states."""

    def __init__(self, config: ModelConfig, ops: Ops, shard: Shard) -> None:
        super().__init__()
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, ops, shard) for _ in range(config.num_layers)
        )
        self.norm = NormWeight(config.hidden_size)

    def forward(
        self,
        ids: torch.Tensor,
        batch: AttentionBatch,
        rope: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        kv_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """ids: [T]; kv_cache: [L, 2, N, S, Hkv, D]; kv_scales: [L, 2, N, S, Hkv] -> [T, H]."""
        x, residual = self.embed_tokens(ids), None
        for index, layer in enumerate(self.layers):
            scales = () if kv_scales is None else (kv_scales[index, 0], kv_scales[index, 1])
            cache = (kv_cache[index, 0], kv_cache[index, 1], *scales)
            x, residual = layer(x, residual, batch, rope, cache)
        x, _ = self.ops.add_rms_norm(x, residual, self.norm.weight, self.eps)
        return x


class CausalLM(nn.Module):
    """A decoder and its output head."""

    def __init__(
        self, config: ModelConfig, ops: Ops, max_position: int, shard: Shard | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, ops, shard or Shard())
        # A tied head has no weight of its own: the loader leaves it None.
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.ops = ops
        self.max_position = max_position
        self.rope: tuple[torch.Tensor, torch.Tensor] | None = None
        self.head_weight: torch.Tensor | None = None

    def build_rope(self, device: torch.device) -> None:
        """Compute the cos/sin table; apart from the constructor, which runs without storage."""
        cos, sin = build_rope_table(
            self.config.rope, self.config.head_dim, self.max_position, self.ops.rope_table
        )
        # Always float32: see ops/rope.py.
        self.rope = (cos.to(device), sin.to(device))

    def prepare(self) -> None:
        """Once, after loading: bring every weight into the form that the table's product wants.

        A tied head is packed as a copy, for the embedding still looks rows up in the plain one.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare(self.ops)
        if self.lm_head is None:
            self.head_weight = self.ops.pack_weight(self.model.embed_tokens.weight)

    def forward(
        self,
        ids: torch.Tensor,
        batch: AttentionBatch,
        kv_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids: [T] -> hidden states [T, H]. Picking the rows to score is the runner's work."""
        assert self.rope is not None
        return self.model(ids, batch, self.rope, kv_cache, kv_scales)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [R, H] -> [R, V], in `out` where it is given."""
        weight = self.head_weight if self.lm_head is None else self.lm_head.weight
        assert weight is not None
        if out is not None:
            return torch.mm(hidden, weight.t(), out=out)
        return self.ops.linear(hidden, weight, None)
