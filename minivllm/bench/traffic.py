"""Counts the bytes that a piece of torch code moves, operation by operation.

Owns the counting rule: each operation reads its input tensors and writes its outputs, once, in
full; views move nothing. That is what eager execution does to memory when tensors are larger than
the caches. Nothing is timed, so the number is the same on every machine. Lesson 02.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Traffic:
    """Bytes read and written, and the operations that moved them."""

    read: int = 0
    written: int = 0
    operations: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.read + self.written


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = list(_tensors([*args, *kwargs.values()]))
        outputs = list(_tensors([result]))
        storages = {t.untyped_storage().data_ptr() for t in inputs}
        in_place = func._schema.is_mutable
        # An output in an input's storage that nobody wrote to is a view: a new shape, no bytes.
        if outputs and not in_place:
            if all(t.untyped_storage().data_ptr() in storages for t in outputs):
                return result
        self.traffic.read += sum(_bytes(t) for t in inputs)
        self.traffic.written += sum(_bytes(t) for t in outputs)
        self.traffic.operations.append(str(func.overloadpacket).removeprefix("aten."))
        return result


def count_traffic(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Traffic:
    """Run `function` and count the bytes that its torch operations read and write."""
    with _Counter() as counter:
        function(*args, **kwargs)
    return counter.traffic


def boundary_bytes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Bytes of the tensors that enter and leave `function`: what one fused kernel must move."""
    outside = list(_tensors([*args, *kwargs.values(), function(*args, **kwargs)]))
    return sum(_bytes(tensor) for tensor in outside)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
