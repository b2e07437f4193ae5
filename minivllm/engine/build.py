"""Puts an engine together: the one place where device, dtype, backend and parts meet.

Owns the order of construction and nothing afterwards. Lesson 00.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from minivllm.config import ModelConfig
from minivllm.engine import kv_pool
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.device import capability, on_device, pick_device, pick_dtype
from minivllm.engine.engine import Engine
from minivllm.engine.memory_probe import activation_bytes, most_tokens
from minivllm.engine.model_runner import ModelRunner
from minivllm.engine.prefill_graphs import MOST_TOKENS
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.scheduler import Scheduler
from minivllm.engine_config import EngineConfig
from minivllm.models.decoder import CausalLM
from minivllm.models.loader import load_model
from minivllm.ops.backends import check_kv_cache, check_model, select_backend
from minivllm.ops.table import (
    CAPTURABLE,
    CAPTURABLE_PREFILL,
    UNITS,
    Ops,
    Part,
    build_ops,
    wrap_parts,
)
from minivllm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Graphs besides their tensors; those of a 28-layer model at 256 seats take about a third of it.
GRAPH_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and what was decided on the way to it."""

    engine: Engine
    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    parts: Mapping[str, Part]
    backend: str


def build_engine(path: Path, options: EngineConfig) -> Built:
    """Read a model directory and build an engine over it. Raises ValueError naming the fault."""
    model_config = ModelConfig.from_dir(path)
    config = options.resolve(model_config)
    tokenizer = load_tokenizer(path)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, model_config.dtype, device)
    parts = wrap_parts(config.parts)
    backend, reason = select_backend(config.attention_backend, device.type, capability(device))
    check_kv_cache(backend, config.kvcache_block_size, config.kv_cache_dtype, capability(device))
    check_model(backend, dtype, model_config.head_dim)
    logger.info("attention backend %s: %s", backend, reason)
    given = sorted(parts.keys() & UNITS.keys())
    if given:
        # A user on a GPU should know what it costs; on a CPU it is always so.
        level = logging.INFO if device.type == "cpu" else logging.WARNING
        logger.log(level, "running eagerly and in step with your own %s", ", ".join(given))
    ops = build_ops(backend, parts, config.kv_cache_dtype)
    in_step = device.type == "cpu" or bool(given)  # a user's part may look at what a step computed
    may_capture = not (in_step or config.enforce_eager)
    captured = Captured(
        decode=may_capture and backend in CAPTURABLE,
        prefill=may_capture and backend in CAPTURABLE_PREFILL,
    )
    assert config.max_model_len is not None
    with on_device(device):
        model = load_model(
            path,
            model_config,
            ops,
            max_position=config.max_model_len,
            dtype=dtype,
            device=device,
            load_format=config.load_format,
            seed=config.seed,
        )
        runner = build_runner(config, model, ops, dtype, device, captured)
    eos_ids = set(model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_ids.add(tokenizer.eos_token_id)
    engine = Engine(
        build_scheduler(config, runner.num_blocks, parts),
        runner,
        tokenizer,
        eos_ids=frozenset(eos_ids),
        share_prompts=config.enable_prefix_caching,
        depth=0 if in_step else 1,
    )
    engine.stats.kv_bytes = runner.kv_bytes
    return Built(engine, config, model_config, tokenizer, parts, backend)


class Captured(NamedTuple):
    """Which launches become graphs."""

    decode: bool
    prefill: bool


def build_runner(
    config: EngineConfig,
    model: CausalLM,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    captured: Captured,
) -> ModelRunner:
    """The runner with its KV pool, sized by what is left once weights and a step have theirs."""
    assert config.max_model_len is not None

    def make(blocks: int) -> ModelRunner:
        return ModelRunner(
            model,
            ops,
            *kv_pool.allocate(blocks, config.kvcache_block_size, model.config, kv_dtype, device),
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            device=device,
        )

    max_model_len = config.max_model_len
    kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
    blocks = config.num_kvcache_blocks
    if blocks is not None:
        free = kv_pool.free_memory(device)
        kv_pool.check_fits(blocks, config.kvcache_block_size, model.config, kv_dtype, free)
    elif device.type == "cpu":
        blocks = kv_pool.num_blocks(config, model.config, kv_dtype, kv_pool.cpu_room())
    else:
        reserved = step_bytes(make, config, captured)
        if captured.decode:
            reserved += config.max_num_seqs * model.config.vocab_size * dtype.itemsize + GRAPH_BYTES
        room = kv_pool.gpu_room(config, device, reserved)
        blocks = kv_pool.num_blocks(config, model.config, kv_dtype, room)
    runner = make(blocks)
    if captured.decode:
        graphs = runner.capture_graphs(most_tokens(config) if captured.prefill else None)
        logger.info(
            "captured %d graphs in %.1f s, %.0f MiB",
            graphs.count,
            graphs.seconds,
            graphs.num_bytes / 2**20,
        )
    return runner


def step_bytes(make: Callable[[int], ModelRunner], config: EngineConfig, captured: Captured) -> int:
    """What the largest step takes, and what the graphs keep of the largest one they hold."""
    tokens = most_tokens(config)
    largest = activation_bytes(make, config, tokens)
    if not captured.prefill:
        return largest
    if tokens <= MOST_TOKENS:
        return 2 * largest
    return largest + activation_bytes(make, config, MOST_TOKENS)


def build_scheduler(config: EngineConfig, blocks: int, parts: Mapping[str, Part]) -> Scheduler:
    """Block manager and scheduler, a user's own where they are given."""
    manager_class = PrefixCache if config.enable_prefix_caching else BlockManager
    manager = parts.get("block_manager", manager_class)(blocks, config.kvcache_block_size)
    assert config.max_num_batched_tokens is not None and config.max_model_len is not None
    scheduler: Scheduler = parts.get("scheduler", Scheduler)(
        manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )
    return scheduler


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The directory's tokenizer, or None where it has none (token ids in and out still work)."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((path / name).exists() for name in names):
        return None
    return Tokenizer.from_dir(path)
