"""Puts an engine together: the one place where device, dtype and parts are chosen.

Owns the order of construction and nothing afterwards. Lesson 00.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from minivllm.config import ModelConfig
from minivllm.engine import kv_pool
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.memory_probe import activation_bytes
from minivllm.engine.model_runner import ModelRunner
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

# Graphs besides their tensors; 35 decode buckets of a 28-layer model take about a third of it.
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
    assert config.max_model_len is not None
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
    in_step = device.type == "cpu" or bool(given)  # a user's part may look at what a step computed
    captured = (
        device.type == "cuda" and backend in CAPTURABLE and not (config.enforce_eager or given)
    )
    runner = build_runner(config, model, ops, dtype, device, captured)
    if captured:
        of_prefill = config.max_num_batched_tokens if backend in CAPTURABLE_PREFILL else None
        graphs = runner.capture_graphs(of_prefill)
        logger.info(
            "captured %d graphs in %.1f s, %.0f MiB",
            graphs.count,
            graphs.seconds,
            graphs.num_bytes / 2**20,
        )
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


def build_runner(
    config: EngineConfig,
    model: CausalLM,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    captured: bool,
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
    if config.num_kvcache_blocks is not None:
        return make(config.num_kvcache_blocks)
    if device.type == "cpu":
        return make(kv_pool.num_blocks(config, model.config, kv_dtype, kv_pool.cpu_room()))
    logits_bytes = config.max_num_seqs * model.config.vocab_size * dtype.itemsize
    reserved = activation_bytes(make, config)
    if captured:  # a step's own memory once more: the graphs keep theirs
        reserved += reserved + logits_bytes + GRAPH_BYTES
    room = kv_pool.gpu_room(config, device, reserved)
    return make(kv_pool.num_blocks(config, model.config, kv_dtype, room))


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


def pick_device(name: str) -> torch.device:
    """The device of the engine; "auto" is the current GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown; one of auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; one of auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} was asked for, and torch sees no CUDA device")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU, e.g. (9, 0); None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def pick_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU (bfloat16 batches are 2-7 times slower there); else the checkpoint's type.

    GPUs before sm80 have no bfloat16 arithmetic: float16 takes its place.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    if checkpoint == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return getattr(torch, checkpoint)
