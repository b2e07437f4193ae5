"""What a checkpoint says about itself: `config.json`, read into a checked dataclass.

Owns the meaning of every config field that changes the mathematics: it is implemented or refused by
name, never dropped. Never imports torch or transformers: the published files are in two
generations of spelling (`rope_theta` + `rope_scaling`, `rope_parameters`; `torch_dtype`, `dtype`),
and transformers 5 understands only its own. Lesson 05.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.rope_config import RopeConfig

# Architecture name -> family. The four share one decoder and differ by flags.
FAMILIES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder, in the field's names.

    `eos_token_ids` is the union of config.json and generation_config.json; the tokenizer's own is
    added by the engine (case K59: one source alone misses ids).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    dtype: str
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_dir(path: Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` where there is one)."""
        raw = read_json(path / "config.json")
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        return ModelConfig.from_dict(raw, generation)

    @staticmethod
    def from_dict(
        raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Check and translate a parsed config. Raises ValueError naming the field."""
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        _refuse_quantised(raw)
        activation = raw.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu")
        num_heads = _positive(raw, "num_attention_heads")
        num_kv_heads = num_heads
        if raw.get("num_key_value_heads") is not None:
            num_kv_heads = _positive(raw, "num_key_value_heads")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads={num_heads} is not a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        attention_bias = bool(raw.get("attention_bias", False))
        eos = {*_token_ids(raw), *_token_ids(generation or {})}
        return ModelConfig(
            architecture=architecture,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=_positive(raw, "hidden_size"),
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=_positive(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(raw, num_heads),
            max_position=_positive(raw, "max_position_embeddings"),
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope=RopeConfig.from_dict(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
            # Qwen2 has biases on q, k and v alone, and no field that says so.
            qkv_bias=family == "qwen2" or (family != "mistral" and attention_bias),
            o_bias=family in ("llama", "qwen3") and attention_bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
            sliding_window=_sliding_window(raw, family),
            dtype=_dtype(raw),
            eos_token_ids=tuple(sorted(eos)),
        )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of keys and values that one token keeps in the cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * element_size


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; a missing or broken file is a ValueError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    raise ValueError(
        f"architecture {names or raw.get('model_type')!r} is not supported; "
        f"supported: {', '.join(FAMILIES)}"
    )


def _refuse_quantised(raw: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "quantization", "compression_config"):
        if raw.get(key):
            method = dict(raw[key]).get("quant_method", "unknown")
            raise ValueError(f"quantization method {method!r} is not supported ({key})")


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config field {key} must be a positive integer, got {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"config field {key} must be a number, got {value!r}")
    return float(value)


def _head_dim(raw: Mapping[str, Any], num_heads: int) -> int:
    """The one rule (case K22): explicit and positive wins, else hidden / heads, else refused."""
    hidden = _positive(raw, "hidden_size")
    if raw.get("head_dim"):
        head_dim = _positive(raw, "head_dim")
    elif hidden % num_heads:
        raise ValueError(
            f"config has no head_dim and hidden_size={hidden} is not a multiple of "
            f"num_attention_heads={num_heads}"
        )
    else:
        head_dim = hidden // num_heads
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even: rotary embedding turns pairs")
    return head_dim


def _sliding_window(raw: Mapping[str, Any], family: str) -> int | None:
    """The window that some layer really uses, or None. Qwen states one and switches it off."""
    # Where the key is absent (null is not), Hugging Face's Mistral has a window all the same.
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)
    if family == "llama" or window is None:
        return None
    if family == "mistral":
        return int(window)
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"layer_types {sorted(unknown)} are not supported")
        return int(window) if "sliding_attention" in layer_types else None
    slides = raw.get("use_sliding_window", False) and (
        raw.get("max_window_layers", 28) < raw["num_hidden_layers"]
    )
    return int(window) if slides else None


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"checkpoint dtype {name!r} is not supported; one of {', '.join(DTYPES)}")
    return name


def _token_ids(raw: Mapping[str, Any]) -> list[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return ids
