"""Device, dtype, parts and tokenizer are chosen in one place."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm.engine import kv_pool
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.build import (
    build_engine,
    build_scheduler,
    load_tokenizer,
)
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine_config import EngineConfig
from minivllm.ops.norms import rms_norm
from minivllm.ops.table import wrap_parts

CPU = torch.device("cpu")
Make = Callable[..., Path]


def test_scheduler_and_block_manager() -> None:
    base = {"max_model_len": 50, "max_num_batched_tokens": 60, "kvcache_block_size": 3}
    for caching, manager_class in ((True, PrefixCache), (False, BlockManager)):
        config = EngineConfig(**base, enable_prefix_caching=caching, max_num_seqs=5)
        scheduler = build_scheduler(config, 9, {})
        assert type(scheduler.block_manager) is manager_class
        assert (scheduler.block_manager.num_blocks, scheduler.block_manager.block_size) == (9, 3)
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (5, 60)
        assert scheduler.max_model_len == 50 and scheduler.enable_chunked_prefill
    parts = wrap_parts({"block_manager": BlockManager})
    config = EngineConfig(**base, enable_chunked_prefill=False)
    scheduler = build_scheduler(config, 9, parts)
    assert type(scheduler.block_manager) is BlockManager and parts["block_manager"].calls == 1
    assert not scheduler.enable_chunked_prefill


def test_cache_is_built_for_the_configs_head_dim(tiny_model: Make) -> None:
    """Case K22: model, cache and rope agree on one head_dim."""
    path = tiny_model("qwen3", head_dim=24)
    built = build_engine(path, EngineConfig(max_model_len=32, kvcache_block_size=4, device="cpu"))
    runner = built.engine.runner
    assert runner.kv_cache.shape[-2:] == (2, 24)
    assert runner.model.rope[0].shape == (32, 12)
    assert built.engine.stats.kv_bytes == runner.kv_cache.numel() * 4


def test_eos_of_all_three_sources(tiny_model: Make, copy_model: Make) -> None:
    path = copy_model(tiny_model("qwen3"), eos_token_id=[7, 8])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<|im_end|>"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    built = build_engine(path, EngineConfig(max_model_len=32, device="cpu"))
    assert built.engine.eos_ids == {7, 8, 9, 257}


def test_own_units_are_announced(tiny_model: Make, caplog: pytest.LogCaptureFixture) -> None:
    options = EngineConfig(max_model_len=32, device="cpu", parts={"rms_norm": rms_norm})
    # The logger's own level too: the command line, tested in the same process, raises it.
    with caplog.at_level(logging.INFO, logger="minivllm"):
        built = build_engine(tiny_model("qwen3"), options)
    assert "in step with your own rms_norm" in caplog.text
    assert "attention backend sdpa: the fastest form on a CPU" in caplog.text
    assert built.backend == "sdpa" and built.engine.depth == 0


@pytest.mark.parametrize("blocks", [10**9, 10**15, 10**21])
def test_a_pool_beyond_memory_is_one_clear_error(
    blocks: int, tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pool, "free_memory", lambda device: 2**34)  # macOS does not say
    options = EngineConfig(max_model_len=32, device="cpu", num_kvcache_blocks=blocks)
    with pytest.raises(ValueError, match=rf"num_kvcache_blocks={blocks} takes .* GiB .* are free"):
        build_engine(tiny_model("qwen3"), options)


def test_tokenizer_or_none(tiny_model: Make, tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tiny_model("qwen3")) is not None
