"""What every kernel's host side needs: a check of where it runs, and the sizes of tiles.

Owns the one clear message for a kernel without a GPU. Never launches anything. A machine without
a card can run every kernel in Triton's interpreter, slowly: TRITON_INTERPRET=1. Lesson 13.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Read once: Triton itself decides at the definition of a kernel, so a later change has no effect.
INTERPRET = bool(knobs.runtime.interpret)
MOST_OVERLAPPED = 1024  # rows of a launch


def check_device(name: str, *tensors: torch.Tensor | None) -> None:
    """Refuse to launch where Triton would only say "0 active drivers", or read a host's memory."""
    for tensor in tensors:
        if tensor is None or tensor.is_cuda or INTERPRET:
            continue
        raise RuntimeError(
            f"the Triton kernel {name} needs CUDA tensors, and got one on {tensor.device}; without "
            "a GPU use attention_backend='torch', or set TRITON_INTERPRET=1 before Python starts"
        )


def check_inner(name: str, tensor: torch.Tensor, dims: int) -> None:
    """The last `dims` dimensions must lie densely: kernels take a stride for the rows only."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-dims:]), reversed(tensor.stride()[-dims:])):
        if size != 1 and stride != expected:
            raise ValueError(
                f"{name}: the last {dims} dimensions must be contiguous; got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        expected *= size


def padded(size: int) -> int:
    """The power of two that a tile of `size` elements takes; `tl.arange` knows no other sizes."""
    return triton.next_power_of_2(size)


@cache  # a question to the driver, asked by every launch
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, (0, 0) in the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def overlaps(device: torch.device, rows: int = 1) -> bool:
    """Whether a kernel is launched so that it starts while the one before it ends: see `begin`.

    From Hopper on. H200, a decode layer of one row: 29.2 us without, 24.6 us with. Prefill's many
    waves of programs gain nothing and pay for the wait: 53 us become 82 for q, k and v of 8192
    tokens.
    """
    return rows <= MOST_OVERLAPPED and capability(device) >= (9, 0)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernel before this one, and let the next one come; first in every kernel.

    Under programmatic dependent launch the next kernel's programs take their places while this
    one's last programs still run, and wait here. Without it, a launch starts after the last program
    of the one before has left. What a kernel reads before this must be older than both.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
