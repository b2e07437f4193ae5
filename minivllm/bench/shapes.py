"""Shapes of published models, for measurements with random weights.

Owns a few config.json contents by name. Speed depends on shapes, not on what the weights say, so a
machine without network can measure a model it does not have: `--model qwen3-0.6b-shape`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": [151645, 151643],
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b-shape": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b-shape": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "smollm2-135m-shape": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    },
}


@contextmanager
def shape_directory(name: str) -> Iterator[Path]:
    """A temporary model directory that holds this config alone; for `load_format="dummy"`."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is unknown; one of {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="minivllm-shape-") as folder:
        path = Path(folder) / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(SHAPES[name], indent=2), encoding="utf-8")
        yield path
