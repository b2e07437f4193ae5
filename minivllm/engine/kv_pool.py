"""The memory of the KV cache: how many blocks there are, and the one tensor that holds them.

Owns the sizing rule of each device. Never hands out a block. Lesson 08.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from minivllm.config import ModelConfig
from minivllm.engine_config import EngineConfig

CGROUP = Path("/sys/fs/cgroup")
CPU_SHARE = 0.25  # of the memory available now: a notebook has other things in it too


def num_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, room: int) -> int:
    """Blocks of the pool: what is useful, or what `room` bytes hold where that is less.

    ValueError with the numbers where not even one sequence of max_model_len fits.
    """
    assert config.max_model_len is not None
    block_bytes = config.kvcache_block_size * token_bytes(model, dtype)
    per_sequence = -(-config.max_model_len // config.kvcache_block_size)
    blocks = min(config.max_num_seqs * per_sequence, room // block_bytes)
    if blocks < per_sequence:
        fits = max(room // block_bytes, 0) * config.kvcache_block_size
        raise ValueError(
            f"the KV cache of one sequence of max_model_len={config.max_model_len} needs "
            f"{per_sequence * block_bytes / 2**20:.0f} MiB and {room / 2**20:.0f} MiB "
            f"are left for it; the largest max_model_len that fits is {fits}"
        )
    return blocks


def check_fits(
    blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, free: int | None
) -> None:
    """ValueError with the numbers where a pool of so many blocks takes more than `free` bytes.

    None: not known. Asked before the memory is: the system promises a CPU's pages before it has
    them, and ends the program when they are used.
    """
    block_bytes = block_size * token_bytes(model, dtype)
    if free is not None and blocks * block_bytes > free:
        gib = 2**30
        raise ValueError(
            f"num_kvcache_blocks={blocks} takes {blocks * block_bytes / gib:,.1f} GiB "
            f"({block_bytes:,} bytes a block), and {free / gib:,.1f} GiB of memory are free; at "
            f"most {free // block_bytes} blocks fit"
        )


def token_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token keeps in the pool, over all layers, an 8-bit cache's scales included."""
    scales = model.kv_bytes_per_token(4) // model.head_dim if dtype.itemsize == 1 else 0
    return model.kv_bytes_per_token(dtype.itemsize) + scales


def allocate(
    blocks: int,
    block_size: int,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[L, 2, N, S, Hkv, D], keys first, and an 8-bit cache's scales [L, 2, N, S, Hkv].

    Zeros, since a NaN left in memory would spread through 0 * NaN. On a CPU a page is really taken
    when it is first written: NumPy's zeros come untouched from the system, where torch's are
    written once over (SmolLM2's default pool: 5.6 GB, 10 s).
    """
    shape = (model.num_layers, 2, blocks, block_size, model.num_kv_heads, model.head_dim)
    cache = _zeros(math.prod(shape) * dtype.itemsize, device).view(dtype).view(shape)
    if dtype.itemsize > 1:
        return cache, None
    return cache, torch.ones(shape[:-1], dtype=torch.float32, device=device)


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


def gpu_room(config: EngineConfig, device: torch.device, reserved: int) -> int:
    """Bytes for the pool: the share of the card, less all that is in use now, less `reserved`.

    Other processes' memory is in use too, and is named where it leaves nothing.
    """
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    others = total - free - ours
    room = int(config.gpu_memory_utilization * total) - (total - free) - reserved
    if room <= 0:
        gib = 2**30
        raise ValueError(
            f"no GPU memory is left for the KV cache: gpu_memory_utilization="
            f"{config.gpu_memory_utilization} of {total / gib:.1f} GiB, of which weights take "
            f"{ours / gib:.1f}, a step and its graphs {reserved / gib:.1f}, and other processes "
            f"and the driver {others / gib:.1f} GiB"
        )
    return room


def cpu_room() -> int:
    """Bytes for the pool: a share of the free memory; of a small laptop's where it is not known."""
    free = free_memory(torch.device("cpu"))
    return int(CPU_SHARE * (8 * 2**30 if free is None else free))


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had now; None where the system does not say (macOS, Windows)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch keeps for reuse it gives back before it fails.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvail")]
    return min([*limits, *_container_room(CGROUP)], default=None)


def _container_room(root: Path) -> Iterator[int]:
    """What the container may still take, where it has a limit: cgroups of version 2, then 1."""
    for folder, most, now, cached in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (int((folder / name).read_text()) for name in (most, now))
            lines = (folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # not that version, or the limit is the word "max"
            continue
        # Pages of files that nobody reads are given up before the limit is felt.
        yield max(limit - used + int(dict(map(str.split, lines)).get(cached, 0)), 0)
