"""Which backend runs where: the choice of `auto`, and one clear message where a chosen one cannot.

Owns what each backend needs of the device, the model and the KV cache. Never builds anything: the
forms themselves stand in `table.py`. `minivllm doctor` prints what is decided here. Lesson 13.
"""

from __future__ import annotations

import os

import torch

from minivllm.engine_config import FLASH_ATTN_BLOCK
from minivllm.ops import compiled, flash_attn
from minivllm.ops.table import BACKENDS

TRITON_CAPABILITY = (7, 5)  # Turing, the oldest that triton compiles tensor-core code for
FP8_CAPABILITY = (8, 9)
# Measured at 256 rows, see LOG.md: why `auto` passes over a package that could run.
OVER_FLASH_ATTN = (
    "; flash_attn is installed and not chosen, for on an H200 our decode attention reads 4.2 TB/s "
    "where FlashAttention-3 reads 3.7"
)


def why_not(backend: str, device: str, capability: tuple[int, int] | None) -> str | None:
    """Why a backend cannot run on such a device, or None where it can."""
    if backend == "sdpa" and device != "cpu":
        return f"is for the CPU, and the device is {device}"
    if backend == "flash_attn":
        return flash_attn.obstacle(device, capability)
    if backend == "compile":
        return compiled.obstacle(device, capability)
    # Triton's interpreter runs kernels on a CPU, some thousand times slower: for tests.
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    able = device == "cuda" and (capability or (0, 0)) >= TRITON_CAPABILITY
    if backend == "triton" and not (able or interpreted):
        found = f"{device} {capability}" if capability else device
        return (
            f"needs a GPU of compute capability {TRITON_CAPABILITY} or higher; "
            f"the device is {found}"
        )
    return None


def select_backend(
    requested: str, device: str, capability: tuple[int, int] | None = None
) -> tuple[str, str]:
    """Name of the backend and the reason, for `minivllm doctor` and the log.

    capability: of the GPU, for device "cuda". ValueError where the backend cannot run there.
    """
    if requested not in ("auto", *BACKENDS):
        raise ValueError(
            f"attention_backend={requested!r} is unknown; one of auto, {', '.join(BACKENDS)}"
        )
    if requested != "auto":
        reason = why_not(requested, device, capability)
        if reason is not None:
            raise ValueError(f"attention_backend={requested!r} {reason}")
        return requested, "chosen by attention_backend"
    if device == "cpu":
        return "sdpa", "the fastest form on a CPU"
    if why_not("triton", device, capability) is not None:
        return "torch", f"compute capability {capability} is below {TRITON_CAPABILITY} for triton"
    passed_over = why_not("flash_attn", device, capability) is None
    return "triton", "this project's own kernels" + (OVER_FLASH_ATTN if passed_over else "")


def check_kv_cache(
    backend: str, block_size: int, dtype: str, capability: tuple[int, int] | None
) -> None:
    """ValueError where a backend's kernels cannot walk such blocks, or the card lacks the type."""
    if backend == "flash_attn" and dtype == "fp8":
        raise ValueError(
            "kv_cache_dtype='fp8' cannot run with attention_backend='flash_attn', which has no "
            "form for our scales; take 'triton' or 'torch'"
        )
    if backend == "triton" and dtype == "fp8" and (capability or FP8_CAPABILITY) < FP8_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype='fp8' needs compute capability {FP8_CAPABILITY} or "
            f"attention_backend='torch'; the GPU has {capability}"
        )
    multiple = {"triton": 16, "flash_attn": FLASH_ATTN_BLOCK}.get(backend, 1)
    if block_size % multiple:
        raise ValueError(
            f"kvcache_block_size={block_size} must be a multiple of {multiple} with "
            f"attention_backend={backend!r}"
        )


def check_model(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """ValueError where a backend's kernels have no form for a model's type or head size."""
    if backend != "flash_attn":
        return
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"attention_backend='flash_attn' computes in float16 or bfloat16, and dtype is {name}"
        )
    if head_dim > flash_attn.LARGEST_HEAD or head_dim % 8:
        raise ValueError(
            "attention_backend='flash_attn' needs heads of a multiple of 8 and at most "
            f"{flash_attn.LARGEST_HEAD} numbers; head_dim is {head_dim}"
        )
