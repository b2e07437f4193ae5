"""Host memory that the GPU copies from and to without the CPU waiting.

Owns the rule that makes that safe: the CPU never writes a pinned buffer that a copy may still read,
and never reads one before its event. Lesson 15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class PinnedRing:
    """Buffers for host-to-device copies, used in turn.

    With one step in flight two would do; four keep the wait in `next` from ever being a real one.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, count: int = 4) -> None:
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(count)]
        self._events = [torch.cuda.Event() for _ in range(count)]
        self._turn = 0

    @contextmanager
    def next(self) -> Iterator[torch.Tensor]:
        """A buffer that no copy reads any more; copies queued in the block are waited for later."""
        index = self._turn
        self._turn = (index + 1) % len(self._buffers)
        self._events[index].synchronize()
        yield self._buffers[index]
        self._events[index].record()


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Queue the copy of a CPU tensor; the CPU goes on at once. For a CPU, the tensor itself.

    `torch.tensor(..., device="cuda")` and `.to("cuda")` wait for all that is queued before them: at
    depth 1 that is the step in flight. torch keeps the pinned copy until the device has read it.
    """
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """A tensor being copied to the host."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once it is complete."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tensor


def start_copy_to_host(tensor: torch.Tensor) -> OnItsWay:
    """Queue the copy behind the work that computes the tensor. A CPU tensor is there already."""
    if tensor.device.type == "cpu":
        return OnItsWay(tensor, None)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return OnItsWay(host, record_event(tensor.device))


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that is queued on the current stream; None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
