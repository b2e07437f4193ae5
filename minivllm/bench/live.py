"""Watches how much memory a piece of torch code holds at once.

Owns the rule: after each operation, the bytes of all storages that the code has made and that
still live; the peak is the largest such sum. Nothing is computed from shapes, so a copy that
nobody thought of is in it. What an operation allocates and frees inside itself is not seen.
Lesson 04.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once, however many views it has."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_bytes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Run `function`; the most bytes that tensors made by it, its result included, held at once."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with _Watch(inputs) as watch:
        function(*args, **kwargs)
    return watch.peak


class _Watch(TorchDispatchMode):
    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._inputs = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in inputs}
        # By identity of the storage: views add nothing. A weak reference keeps nothing alive.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._inputs:
                    self._made[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result
