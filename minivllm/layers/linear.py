"""The linear layers, each with a loader that knows where a checkpoint tensor goes.

Owns packed weights (q, k and v in one matrix; gate and up in one) and their partition over ranks.
Never communicates: with one rank a partition is the whole. Lessons 05 and 14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from minivllm.ops.table import Ops

# (parameter, tensor from the file, name of the part or "") -> None
WeightLoader = Callable[[nn.Parameter, torch.Tensor, str], None]


@dataclass(frozen=True, slots=True)
class Shard:
    """This process's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, what: str) -> int:
        """Size of one rank's share; ValueError where it does not come out even (case K37)."""
        if total % self.size:
            raise ValueError(f"{what}={total} is not divisible by {self.size} ranks")
        return total // self.size

    def slice(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of a full tensor, along `dim`."""
        if self.size == 1:
            return tensor  # whatever its shape: the copy compares it
        size = self.part(tensor.shape[dim], "weight dimension")
        return tensor.narrow(dim, self.rank * size, size)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.shape != source.shape:
        raise ValueError(f"shape {tuple(source.shape)} where {tuple(target.shape)} is expected")
    target.copy_(source)  # converts to the model's dtype on the way


class Linear(nn.Module):
    """y = x W^T + b. The base, and the replicated form: every rank holds all of it."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.product: Callable[..., torch.Tensor] = F.linear

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors packed into this weight; ("",) where it is one."""
        return ("",)

    def weight_loader(self, parameter: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        """Copy a checkpoint tensor to its place."""
        _copy(parameter.data, tensor)

    def prepare(self, ops: Ops) -> None:
        """Once, after loading: take the table's product, and the weight in the form it wants."""
        self.product = ops.linear
        packed = ops.pack_weight(self.weight)
        if packed is not self.weight:
            del self.weight  # the plain copy's memory goes with the parameter
            self.weight = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in] -> [T, out]."""
        return self.product(x, self.weight, self.bias)


class PackedColumnLinear(Linear):
    """Several column-parallel matrices over the same input, as one product.

    One product instead of two or three reads x once and launches once. Each matrix is split by
    output rows, so that a rank holds whole heads or whole gate/up pairs.
    """

    def __init__(self, in_features: int, sizes: dict[str, int], bias: bool, shard: Shard) -> None:
        self.shard = shard
        self.sizes = {name: shard.part(size, name) for name, size in sizes.items()}
        super().__init__(in_features, sum(self.sizes.values()), bias)

    @property
    def parts(self) -> tuple[str, ...]:
        """The packed matrices, in the order of their rows."""
        return tuple(self.sizes)

    def weight_loader(self, parameter: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        """Copy one matrix (or bias) to its rows."""
        offset = 0
        for name, size in self.sizes.items():
            if name == part:
                _copy(parameter.data.narrow(0, offset, size), self.shard.slice(tensor, 0))
                return
            offset += size
        raise ValueError(f"part {part!r} is not one of {self.parts}")

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, sum of sizes] -> one view a part."""
        return y.split(list(self.sizes.values()), dim=-1)


class RowLinear(Linear):
    """A matrix split by input columns: each rank's product is a summand of the result."""

    def __init__(self, in_features: int, out_features: int, bias: bool, shard: Shard) -> None:
        self.shard = shard
        super().__init__(shard.part(in_features, "in_features"), out_features, bias)

    def weight_loader(self, parameter: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        """Copy this rank's columns; a bias is whole on every rank."""
        _copy(parameter.data, self.shard.slice(tensor, 1) if tensor.dim() == 2 else tensor)


class Embedding(nn.Module):
    """Token embedding, and the output head where the two are tied."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    parts = ("",)

    def weight_loader(self, parameter: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        """Copy the whole table."""
        _copy(parameter.data, tensor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [T] -> [T, H]."""
        return F.embedding(ids, self.weight)


class NormWeight(nn.Module):
    """The scale of an RMSNorm. The arithmetic is the op table's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    parts = ("",)

    def weight_loader(self, parameter: nn.Parameter, tensor: torch.Tensor, part: str) -> None:
        """Copy the vector."""
        _copy(parameter.data, tensor)
