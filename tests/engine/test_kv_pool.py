"""How large the pool is, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm.config import ModelConfig
from minivllm.engine import kv_pool
from minivllm.engine_config import EngineConfig

CPU = torch.device("cpu")
MODEL = ModelConfig.from_dict(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1000,
    }
)
TOKEN = 2 * 3 * 2 * 32 * 4  # keys and values, layers, heads, head_dim, float32


def blocks(room: int, **options) -> int:
    config = EngineConfig.from_options(options).resolve(MODEL)
    return kv_pool.num_blocks(config, MODEL, torch.float32, room)


def test_shape_and_content() -> None:
    pool, scales = kv_pool.allocate(5, 3, MODEL, torch.bfloat16, CPU)
    assert scales is None
    assert pool.shape == (3, 2, 5, 3, 2, 32) and pool.dtype == torch.bfloat16
    assert not pool.any()
    assert MODEL.kv_bytes_per_token(4) == TOKEN
    assert pool.numel() * pool.element_size() == 5 * 3 * MODEL.kv_bytes_per_token(2)


def test_an_8_bit_pool_has_a_scale_for_each_token_and_head() -> None:
    pool, scales = kv_pool.allocate(5, 3, MODEL, torch.float8_e4m3fn, CPU)
    assert scales is not None and scales.shape == pool.shape[:-1]
    assert pool.nbytes + scales.nbytes == 15 * kv_pool.token_bytes(MODEL, torch.float8_e4m3fn)


def test_no_more_than_is_useful() -> None:
    assert blocks(2**40, max_num_seqs=5, max_model_len=100, kvcache_block_size=16) == 5 * 7
    assert blocks(2**40, max_num_seqs=5, max_model_len=96, kvcache_block_size=16) == 5 * 6


def test_no_more_than_there_is_room_for() -> None:
    room = 70 * 16 * TOKEN - 1
    assert blocks(room, max_num_seqs=5, max_model_len=1000) == 69
    config = EngineConfig(max_model_len=1000)
    assert kv_pool.num_blocks(config, MODEL, torch.bfloat16, room) == 139  # half the bytes


def test_too_little_room_names_what_would_fit() -> None:
    room = 10 * 16 * TOKEN
    with pytest.raises(ValueError, match=r"max_model_len=1000 .* the largest .* that fits is 160"):
        blocks(room)
    assert blocks(room, max_model_len=160) == 10  # and it does fit
    with pytest.raises(ValueError, match="0 MiB are left .* that fits is 0"):
        blocks(0)


def test_room_on_this_machine() -> None:
    assert 0 < kv_pool.cpu_room() <= (kv_pool.free_memory(CPU) or 8 * 2**30)


def test_what_torch_keeps_for_reuse_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 70)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 30)
    assert kv_pool.free_memory(torch.device("cuda", 0)) == 140


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_pool_that_was_asked_for_must_fit(dtype: torch.dtype) -> None:
    block = 16 * kv_pool.token_bytes(MODEL, dtype)
    kv_pool.check_fits(70, 16, MODEL, dtype, 70 * block)
    kv_pool.check_fits(10**12, 16, MODEL, dtype, None)  # nobody knows
    words = rf"num_kvcache_blocks=71 takes .* \({block:,} bytes a block\), .* at most 70 blocks fit"
    with pytest.raises(ValueError, match=words):
        kv_pool.check_fits(71, 16, MODEL, dtype, 71 * block - 1)


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        (".", ("memory.max", "memory.current", "inactive_file")),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_a_container_has_what_it_does_not_use(
    folder: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    most, now, cached = names
    (tmp_path / folder).mkdir(exist_ok=True)
    files = {most: "1000", now: "700\n", "memory.stat": f"anon 5\n{cached} 200\n"}
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    assert list(kv_pool._container_room(tmp_path)) == [500]
    (tmp_path / folder / most).write_text("max\n")
    assert list(kv_pool._container_room(tmp_path)) == []
