"""The memory of the KV cache: how many blocks there are, and the one tensor that holds them.

Owns the sizing rule of each device. Never hands out a block. Lesson 08.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from minivllm.config import ModelConfig
from minivllm.engine_config import EngineConfig

CPU_SHARE = 0.25  # of the memory available now: a notebook has other things in it too


def num_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Blocks of the pool: as asked, or the least of what is useful and what there is room for.

    ValueError with the numbers where not even one sequence of max_model_len fits.
    """
    assert config.max_model_len is not None
    if config.num_kvcache_blocks is not None:
        return config.num_kvcache_blocks
    block_bytes = config.kvcache_block_size * model.kv_bytes_per_token(dtype.itemsize)
    per_sequence = -(-config.max_model_len // config.kvcache_block_size)
    useful = config.max_num_seqs * per_sequence
    room = _cpu_room() if device.type == "cpu" else _cuda_room(config, device)
    blocks = min(useful, room // block_bytes)
    if blocks < per_sequence:
        fits = max(room // block_bytes, 0) * config.kvcache_block_size
        raise ValueError(
            f"the KV cache of one sequence of max_model_len={config.max_model_len} needs "
            f"{per_sequence * block_bytes / 2**20:.0f} MiB and {max(room, 0) / 2**20:.0f} MiB "
            f"are free for it; the largest max_model_len that fits is {fits}"
        )
    return blocks


def allocate(
    blocks: int,
    block_size: int,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[L, 2, N, S, Hkv, D], keys first. Zeros: a NaN left in memory would spread through 0 * NaN.

    On a CPU a page is really taken when it is first written: NumPy's zeros come untouched from the
    system, where torch's are written once over (SmolLM2's default pool: 5.6 GB, 10 s).
    """
    shape = (model.num_layers, 2, blocks, block_size, model.num_kv_heads, model.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _cuda_room(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(config.gpu_memory_utilization * total) - (total - free)


def _cpu_room() -> int:
    """A share of the available memory, within the container's limit."""
    limits = [_available_memory()]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup") / name
        if file.exists():
            text = file.read_text().strip()
            if text.isdigit():  # "max" where there is no limit
                limits.append(int(text))
    return int(CPU_SHARE * min(limits))


def _available_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 8 * 2**30  # no /proc on macOS and Windows: assume a small laptop
