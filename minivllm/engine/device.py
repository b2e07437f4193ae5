"""Where an engine computes and in which type, and the rule of several GPUs in one process.

Owns the two choices and `on_device`. Never allocates. Lesson 00.
"""

from __future__ import annotations

import torch


def on_device(device: torch.device) -> torch.cuda.device:
    """While it is entered, `device` is the current GPU; nothing changes for a CPU.

    Kernels, events, streams and captures all go to the current GPU, wherever their tensors are: an
    engine on cuda:1 would otherwise wait for an event of cuda:0. Threads have a current GPU each.
    """
    return torch.cuda.device(device.index if device.type == "cuda" else -1)


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
        return torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
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
    if checkpoint == "bfloat16" and (capability(device) or (0, 0)) < (8, 0):
        return torch.float16
    return getattr(torch, checkpoint)
