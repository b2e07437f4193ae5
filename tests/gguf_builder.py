"""A tiny GGUF file with known float weights, as llama.cpp's converter would have written them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTER, LAYERS = 3, 1, 4, 12, 20, 2


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(extra)) for b in range(256)]


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll", "Ġw", "22"]
MERGES = ["h e", "l l", "Ġ w", "2 2"]


def to_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """The forward permutation from its meaning: rows (i, i + D/2) become (2i, 2i + 1)."""
    out = np.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + i + dim // 2]
    return out


def known_weights(tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under Hugging Face's names, float32."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "mlp.gate_proj": (INTER, HIDDEN),
            "mlp.up_proj": (INTER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTER),
        }
        shapes |= {f"model.layers.{i}.{part}.weight": shape for part, shape in layer.items()}
    return {name: rng.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}


GGUF_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_PARTS[part]}.weight"


@dataclass
class GgufMaker:
    """Writes GGUF files; the arguments of `make` spoil one thing each."""

    folder: Path
    count: int = field(default=0)

    def make(
        self,
        tied: bool = True,
        arch: str = "llama",
        pre: str = "smollm",
        tokenizer_model: str = "gpt2",
        fields: dict[str, Any] | None = None,
        drop: str = "",
        extra: str = "",
    ) -> Path:
        self.count += 1
        path = self.folder / f"m{self.count}.gguf"
        w = GGUFWriter(path, arch)
        w.add_context_length(64)
        w.add_embedding_length(HIDDEN)
        w.add_feed_forward_length(INTER)
        w.add_block_count(LAYERS)
        w.add_head_count(HEADS)
        w.add_head_count_kv(KV_HEADS)
        w.add_rope_freq_base(5000.0)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_tokenizer_model(tokenizer_model)
        w.add_tokenizer_pre(pre)
        w.add_token_list(TOKENS)
        w.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
        w.add_token_merges(MERGES)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_chat_template("{{ messages[0]['content'] }}")
        for key, value in (fields or {}).items():
            w.add_string(key, value) if isinstance(value, str) else w.add_uint32(key, value)
        for name, weight in known_weights(tied).items():
            if name == drop:
                continue
            if "q_proj" in name:
                weight = to_llama_cpp(weight, HEADS)
            if "k_proj" in name:
                weight = to_llama_cpp(weight, KV_HEADS)
            w.add_tensor(gguf_name(name), weight)
        if extra:
            w.add_tensor(extra, np.ones(4, dtype=np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return path
