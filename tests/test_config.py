"""config.json in both generations of spelling, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.config import ModelConfig, read_json
from minivllm.rope_config import RopeConfig
from tiny_models import FAMILIES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def read(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    """The config with changes; a value of ... deletes the key."""
    merged = {**raw, **changes}
    return ModelConfig.from_dict({k: v for k, v in merged.items() if v is not ...})


def test_published_qwen3() -> None:
    """Qwen3-0.6B, in the spelling it is published in."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"eos_token_id": [151645, 151643]},
    )
    assert config == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position=40960,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6, "default", {}),
        tie_word_embeddings=True,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        sliding_window=None,
        dtype="bfloat16",
        eos_token_ids=(151643, 151645),
    )
    assert (config.q_size, config.kv_size) == (2048, 1024)
    assert config.kv_bytes_per_token(2) == 2 * 28 * 8 * 128 * 2 == 114688


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_transformers_writes_today(name: str, tiny_model) -> None:
    """transformers 5 saves its own spelling: the same model must be read from it."""
    path = tiny_model(name)
    raw = json.loads((path / "config.json").read_text())
    assert "rope_parameters" in raw and "dtype" in raw
    config = ModelConfig.from_dir(path)
    old = {k: v for k, v in raw.items() if k not in ("rope_parameters", "dtype", "layer_types")}
    old |= {"rope_theta": raw["rope_parameters"]["rope_theta"], "torch_dtype": raw["dtype"]}
    assert ModelConfig.from_dict(old) == config
    assert config.num_kv_heads == 2 and config.head_dim == 16


def test_biases_of_the_families() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
        return config.qk_norm, config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases(read(LLAMA)) == (False, False, False, False)
    assert biases(read(LLAMA, attention_bias=True)) == (False, True, True, False)
    assert biases(read(LLAMA, mlp_bias=True)) == (False, False, False, True)
    assert biases(read(QWEN2)) == (False, True, False, False)
    assert biases(read(QWEN3)) == (True, False, False, False)
    assert biases(read(QWEN3, attention_bias=True)) == (True, True, True, False)
    assert biases(read(MISTRAL)) == (False, False, False, False)


# -- rope -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_both_spellings_of_scaled_rope(key: str, kind: str) -> None:
    expected = RopeConfig(5000.0, "llama3", LLAMA3)
    outside = read(LLAMA, **{key: {kind: "llama3", **LLAMA3}, "rope_theta": 5000})
    inside = read(LLAMA, **{key: {kind: "llama3", **LLAMA3, "rope_theta": 5000}})
    assert outside.rope == inside.rope == expected
    both = read(LLAMA, rope_theta=5000, **{key: {"type": "x", "rope_type": "llama3", **LLAMA3}})
    assert both.rope == expected


@pytest.mark.parametrize("nothing", [..., None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_unscaled_rope(nothing: Any) -> None:
    assert read(LLAMA, rope_scaling=nothing).rope == RopeConfig(10000.0, "default", {})
    assert read(LLAMA, rope_theta=1e6, rope_scaling=nothing).rope.theta == 1e6


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "foo"])
def test_other_rope_types_are_refused_by_name(kind: str) -> None:
    for key in ("rope_type", "type"):
        with pytest.raises(ValueError, match=f"'{kind}'.*default, linear, llama3, yarn"):
            read(LLAMA, rope_scaling={key: kind, "factor": 2.0})


def test_rope_keys_are_accounted_for() -> None:
    for missing in LLAMA3:
        scaling = {"rope_type": "llama3", **LLAMA3}
        del scaling[missing]
        with pytest.raises(ValueError, match=f"missing keys.*{missing}"):
            read(LLAMA, rope_scaling=scaling)
    with pytest.raises(ValueError, match="unsupported keys.*mrope_section"):
        read(LLAMA, rope_scaling={"type": "linear", "factor": 2.0, "mrope_section": [1]})
    with pytest.raises(ValueError, match="missing keys.*factor"):
        read(LLAMA, rope_scaling={"type": "linear"})
    assert read(LLAMA, rope_scaling={"type": "linear", "factor": 2.0, "x": None}).rope.scaling


def test_yarn_takes_its_original_length_from_the_config() -> None:
    rope = read(LLAMA, rope_scaling={"type": "yarn", "factor": 2.0}).rope
    assert rope.scaling["original_max_position_embeddings"] == 512
    given = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    assert read(LLAMA, rope_scaling=given).rope.scaling["original_max_position_embeddings"] == 64


def test_partial_rotary_factor() -> None:
    assert read(LLAMA, partial_rotary_factor=1.0).rope.scaling == {}
    for changes in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ):
        with pytest.raises(ValueError, match="partial_rotary_factor=0.5"):
            read(LLAMA, **changes)


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [..., None, 0])
def test_head_dim_from_the_others(head_dim: Any) -> None:
    assert read(LLAMA, head_dim=head_dim).head_dim == 16


def test_head_dim_given() -> None:
    config = read(QWEN3)
    assert (config.head_dim, config.q_size, config.kv_size) == (32, 128, 64)
    with pytest.raises(ValueError, match="head_dim"):
        read(QWEN3, head_dim=-8)
    with pytest.raises(ValueError, match="head_dim"):
        read(QWEN3, head_dim=15)
    with pytest.raises(ValueError, match="hidden_size=60 .* num_attention_heads=8"):
        read(LLAMA, hidden_size=60, num_attention_heads=8, num_key_value_heads=8)


def test_an_odd_head_dim_that_nobody_stated() -> None:
    """RoPE turns pairs: hidden / heads = 15 is as impossible as head_dim = 15."""
    with pytest.raises(ValueError, match="15"):
        read(LLAMA, hidden_size=60)


@pytest.mark.parametrize("kv_heads", [..., None])
def test_kv_heads_from_the_others(kv_heads: Any) -> None:
    assert read(LLAMA, num_key_value_heads=kv_heads).num_kv_heads == 4


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="num_attention_heads=4 .* num_key_value_heads=3"):
        read(LLAMA, num_key_value_heads=3)


@pytest.mark.parametrize("bad", [..., None, 0, -1, 1.5, "4", True])
@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    + ["max_position_embeddings"],
)
def test_sizes_must_be_positive_integers(key: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} must be a positive integer"):
        read(LLAMA, **{key: bad})


# -- refused --------------------------------------------------------------------------------------


def test_other_architectures_are_refused_by_name() -> None:
    for names in (["GPT2LMHeadModel"], [], None, ...):
        with pytest.raises(ValueError, match="not supported; supported: Qwen3ForCausalLM"):
            read(LLAMA, architectures=names)
    with pytest.raises(ValueError, match="gpt2"):
        read(LLAMA, architectures=..., model_type="gpt2")


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_other_activations_are_refused_by_name(activation: str) -> None:
    with pytest.raises(ValueError, match=f"hidden_act '{activation}'"):
        read(LLAMA, hidden_act=activation)


def test_dtype() -> None:
    assert read(LLAMA).dtype == "float32"
    assert read(LLAMA, torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(LLAMA, dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert read(LLAMA, torch_dtype="torch.float16").dtype == "float16"
    with pytest.raises(ValueError, match="'float8_e4m3fn'"):
        read(LLAMA, dtype="float8_e4m3fn")


def test_sliding_window() -> None:
    """The window that some layer uses: what Qwen states and switches off is none."""
    assert read(LLAMA, sliding_window=100).sliding_window is None
    assert read(MISTRAL, sliding_window=100).sliding_window == 100
    assert read(MISTRAL, sliding_window=None).sliding_window is None
    assert read(MISTRAL).sliding_window == 4096  # absent is not null: the family's default holds
    assert not read(MISTRAL, attention_bias=True).qkv_bias  # a field that this family ignores
    for raw in (QWEN2, QWEN3):
        assert read(raw, sliding_window=100).sliding_window is None
        assert read(raw, sliding_window=100, use_sliding_window=False).sliding_window is None
        on = {"sliding_window": 100, "use_sliding_window": True}
        assert read(raw, **on, max_window_layers=1).sliding_window == 100
        assert read(raw, **on, max_window_layers=2).sliding_window is None
        full, some = ["full_attention"] * 2, ["full_attention", "sliding_attention"]
        assert read(raw, **on, layer_types=full).sliding_window is None
        assert read(raw, **on, layer_types=some).sliding_window == 100
        with pytest.raises(ValueError, match="chunked_attention"):
            read(raw, **on, layer_types=["chunked_attention"] * 2)


def test_read_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match="config.json does not exist"):
        read_json(file)
    for text, match in (("{", "not valid JSON"), ("[1]", "JSON object, not list")):
        file.write_text(text)
        with pytest.raises(ValueError, match=match):
            read_json(file)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="not valid JSON"):
        read_json(file)
    file.write_text('{"a": "é"}', encoding="utf-8")
    assert read_json(file) == {"a": "é"}


def test_the_config_half_imports_no_torch() -> None:
    import subprocess
    import sys

    modules = ["config", "engine_config", "sampling_params", "outputs", "engine.sequence"]
    modules += ["engine.block_manager", "engine.prefix_cache", "engine.scheduler"]
    modules += ["engine.step_plan"]
    code = "".join(f"import minivllm.{module}\n" for module in modules)
    code += "import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
