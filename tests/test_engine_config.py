"""Engine options: names, types, limits, and the arithmetic between them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from minivllm.config import ModelConfig
from minivllm.engine_config import EngineConfig


def model(**changes: Any) -> ModelConfig:
    raw = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 10_000,
        "sliding_window": None,
        **changes,
    }
    return ModelConfig.from_dict(raw)


def resolve(model_config: ModelConfig | None = None, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(options).resolve(model_config or model())


def test_defaults_are_vllms() -> None:
    config = EngineConfig.from_options({})
    assert config.max_num_seqs == 256 and config.kvcache_block_size == 16
    assert config.gpu_memory_utilization == 0.9 and config.seed == 0
    assert config.dtype == config.device == config.load_format == "auto"
    assert config.enable_prefix_caching and config.enable_chunked_prefill
    assert not config.enforce_eager and config.tensor_parallel_size == 1
    resolved = resolve()
    assert resolved.max_model_len == 10_000 and resolved.max_num_batched_tokens == 8192


def test_blocks_of_flash_attn_are_larger_unless_a_size_is_given() -> None:
    """A size that was given stays, the usual 16 too: the table then refuses it by name."""
    flash = {"attention_backend": "flash_attn"}
    assert EngineConfig.from_options(flash).kvcache_block_size == 256
    for size in (16, 256, 512):
        given = EngineConfig.from_options({**flash, "kvcache_block_size": size})
        assert given.kvcache_block_size == size
    for name in ("auto", "torch", "triton", "compile"):
        config = EngineConfig.from_options({"attention_backend": name})
        assert config.kvcache_block_size == 16


def test_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_options({"max_num_seq": 4})
    with pytest.raises(TypeError, match="'zzz'; known: max_model_len, "):
        EngineConfig.from_options({"zzz": 4})


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1


@pytest.mark.parametrize("bad", [0, -1])
@pytest.mark.parametrize(
    "name",
    ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "kvcache_block_size"]
    + ["num_kvcache_blocks", "tensor_parallel_size"],
)
def test_counts_have_limits_and_types(name: str, bad: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {bad}"):
        EngineConfig(**{name: bad})
    for wrong in (1.0, "8", True, [1]):
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            EngineConfig(**{name: wrong})


def test_none_where_it_means_decide() -> None:
    EngineConfig(max_model_len=None, max_num_batched_tokens=None, num_kvcache_blocks=None)
    for name in ("max_num_seqs", "kvcache_block_size", "tensor_parallel_size", "seed"):
        with pytest.raises(TypeError, match=name):
            EngineConfig(**{name: None})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_num_seqs": 65536}, "max_num_seqs=65536 must be at most 65535"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 1.5}, "got 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "got nan"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; one of auto, float32"),
        ({"load_format": "gguf"}, "load_format='gguf' is unknown"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not built"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is unknown"),
    ],
)
def test_values_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seed": 1.5}, "seed must be an integer"),
        ({"seed": True}, "seed must be an integer"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching must be True or False"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill must be True or False"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number"),
        ({"parts": [len]}, "parts must be a dict"),
    ],
)
def test_types_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        EngineConfig(**options)


# -- what must fit together -----------------------------------------------------------------------


def test_max_model_len() -> None:
    assert resolve(max_model_len=10_000).max_model_len == 10_000
    with pytest.raises(ValueError, match="max_model_len=10001 .* max_position_embeddings=10000"):
        resolve(max_model_len=10_001)


def test_sliding_window_must_hold_max_model_len() -> None:
    windowed = model(sliding_window=4096)
    assert resolve(windowed, max_model_len=4096).max_model_len == 4096
    for options in ({"max_model_len": 4097}, {}):
        with pytest.raises(ValueError, match="sliding window of 4096 .* max_model_len=4096 or"):
            resolve(windowed, **options)


def test_budget_with_chunked_prefill() -> None:
    """A budget may be smaller than a prompt, down to one token."""
    assert resolve(max_num_batched_tokens=1, max_num_seqs=1).max_num_batched_tokens == 1
    assert resolve(model(max_position_embeddings=100)).max_num_batched_tokens == 8192


def test_budget_without_chunked_prefill() -> None:
    off = {"enable_chunked_prefill": False}
    assert resolve(**off).max_num_batched_tokens == 10_000
    assert resolve(**off, max_model_len=100).max_num_batched_tokens == 8192
    assert resolve(**off, max_model_len=100, max_num_batched_tokens=100).max_model_len == 100
    with pytest.raises(ValueError, match="max_num_batched_tokens=99 is below max_model_len=100"):
        resolve(**off, max_model_len=100, max_num_batched_tokens=99)


def test_seats_never_exceed_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    """Every running sequence can decode in every step; the change is said, not silent."""
    with caplog.at_level(logging.WARNING):
        assert resolve(max_num_batched_tokens=256).max_num_seqs == 256
        assert not caplog.records
        assert resolve(max_num_batched_tokens=3, max_num_seqs=5).max_num_seqs == 3
    assert "max_num_seqs lowered from 5 to max_num_batched_tokens=3" in caplog.text


def test_resolve_changes_nothing_else() -> None:
    config = EngineConfig(seed=7, kvcache_block_size=3, num_kvcache_blocks=9)
    resolved = config.resolve(model())
    same = dataclasses.asdict(resolved) | {"max_model_len": None, "max_num_batched_tokens": None}
    assert same == dataclasses.asdict(config)
    assert resolved.resolve(model()) == resolved
