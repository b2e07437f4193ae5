"""Converts a GGUF file of the Llama architecture into a Hugging Face directory.

Owns the names and layouts of the tensors and the fields of config.json; the tokenizer half is in
gguf_tokenizer.py. The values stay exactly what the quantised file says: dequantised to float32,
never rounded again. What it cannot express it refuses by name (other architectures, experts, RoPE
scaling), because a wrong guess would still produce fluent text. Serves chapter 00.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tqdm import tqdm

from minivllm.fetch.gguf_tokenizer import write_tokenizer

# llama.cpp's tensor names -> Hugging Face's. A name outside these tables is an error.
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Array: TypeAlias = NDArray[np.float32]


def convert_llama_gguf(gguf_path: Path, out_dir: Path, progress: bool = True) -> None:
    """Write config.json, model.safetensors (float32), the tokenizer and generation_config.json.

    `out_dir` must exist; nothing else is written. A float32 copy takes 4 bytes per parameter, so
    538 MB for SmolLM2-135M: bfloat16 would halve that but round the values of the quantised file.
    Raises ValueError naming the field or tensor that cannot be converted.
    """
    reader = GGUFReader(gguf_path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    config = llama_config(fields)
    weights = dict(_converted(reader, config, progress))
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    _check_complete(weights, config)

    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes the file private to its owner; a cache may be shared.
    (out_dir / "model.safetensors").chmod(0o644)
    _write_json(out_dir / "config.json", config)
    token_ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out_dir / "generation_config.json", token_ids)
    write_tokenizer(fields, out_dir, config["max_position_embeddings"])


def llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of a GGUF file's metadata `fields`; ValueError names what is unsupported."""
    arch = fields.get("general.architecture")
    if arch != "llama":
        raise ValueError(f"GGUF architecture {arch!r} cannot be converted; only 'llama' can")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"GGUF llama.rope.scaling.type {scaling!r} cannot be converted")
    if fields.get("llama.expert_count", 0):
        raise ValueError("GGUF files with experts (llama.expert_count) cannot be converted")

    hidden, heads = (
        _need(fields, "llama.embedding_length"),
        _need(fields, "llama.attention.head_count"),
    )
    head_dim = fields.get("llama.attention.key_length", hidden // heads)
    rotated = fields.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"GGUF llama.rope.dimension_count {rotated} must equal head_dim {head_dim}"
        )
    eos = fields.get("tokenizer.ggml.eos_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _need(fields, "llama.feed_forward_length"),
        "num_hidden_layers": _need(fields, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(_need(fields, "tokenizer.ggml.tokens")),
        "max_position_embeddings": _need(fields, "llama.context_length"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "rms_norm_eps": _shortest(_need(fields, "llama.attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
        "initializer_range": 0.02,
        "torch_dtype": "float32",
    }


def unpermute_rope(weight: Array, num_heads: int) -> Array:
    """Rows of a q or k projection from llama.cpp's rotary layout back to Hugging Face's.

    weight [num_heads * D, hidden]. llama.cpp rotates neighbours (2i, 2i + 1) of a head, Hugging
    Face rotates halves (i, i + D/2); its converter therefore interleaved the halves of every head.
    Skipping this leaves every shape valid and the text fluent-looking nonsense.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _converted(
    reader: GGUFReader, config: dict[str, Any], progress: bool
) -> Iterator[tuple[str, Array]]:
    """(Hugging Face name, float32 values) of every tensor in the file."""
    bar = tqdm(reader.tensors, desc="converting", unit="tensor", disable=not progress)
    for tensor in bar:
        name = _hf_name(tensor.name)
        # GGUF lists dimensions fastest first; dequantize() already gives [out, in] rows.
        values = dequantize(tensor.data, tensor.tensor_type)
        values = np.array(values, dtype=np.float32).reshape(tuple(map(int, tensor.shape[::-1])))
        if name.endswith("q_proj.weight"):
            values = unpermute_rope(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = unpermute_rope(values, config["num_key_value_heads"])
        yield name, values


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; ValueError for one outside the tables."""
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, suffix = rest.partition(".")
    if name.startswith("blk.") and block.isdigit() and part in _LAYER and suffix == "weight":
        return f"model.layers.{block}.{_LAYER[part]}.weight"
    # rope_freqs.weight (Llama 3's scaling) and biases end here: dropping them would change results.
    raise ValueError(f"GGUF tensor {name!r} cannot be converted")


def _check_complete(weights: dict[str, Array], config: dict[str, Any]) -> None:
    """ValueError for a file that lacks tensors: a truncated one, or one part of a split."""
    layers = range(config["num_hidden_layers"])
    wanted = {f"model.layers.{i}.{part}.weight" for i in layers for part in _LAYER.values()}
    wanted |= {"model.embed_tokens.weight", "model.norm.weight"}
    missing = sorted(wanted - weights.keys())
    if missing:
        raise ValueError(f"the GGUF file lacks {len(missing)} tensors, among them {missing[0]!r}")


def _need(fields: dict[str, Any], key: str) -> Any:
    """A field that every llama file has."""
    if key not in fields:
        raise ValueError(f"the GGUF file has no field {key!r}")
    return fields[key]


def _shortest(value: float) -> float:
    """A float32 as people write it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
