"""The linear family: where the loader puts a checkpoint's tensors, for one rank and for several."""

from __future__ import annotations

import pytest
import torch

from minivllm.layers.linear import (
    Embedding,
    Linear,
    NormWeight,
    PackedColumnLinear,
    RowLinear,
    Shard,
)

SIZES = {"q": 8, "k": 4, "v": 4}


def filled(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def load(module: Linear, part: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    module.weight_loader(module.weight, weight, part)
    if bias is not None:
        module.weight_loader(module.bias, bias, part)


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    module, weight, offset = Linear(6, 5, bias), filled(5, 6), filled(5)
    load(module, "", weight, offset if bias else None)
    x = filled(3, 6)
    torch.testing.assert_close(module(x), x @ weight.T + (offset if bias else 0))
    assert module.parts == ("",) and (module.bias is not None) == bias
    assert not module.weight.requires_grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_columns(ranks: int, bias: bool) -> None:
    """Each rank's part of q, k and v is that rank's rows of the full products."""
    weights = {name: filled(size, 6) for name, size in SIZES.items()}
    biases = {name: filled(size) for name, size in SIZES.items()}
    x = filled(3, 6)
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in SIZES}
    for rank in range(ranks):
        module = PackedColumnLinear(6, SIZES, bias, Shard(rank, ranks))
        assert module.parts == ("q", "k", "v")
        for name in reversed(SIZES):  # the order in the file is not the order of the rows
            load(module, name, weights[name], biases[name] if bias else None)
        for name, part in zip(SIZES, module.split(module(x)), strict=True):
            outputs[name].append(part)
    for name, parts in outputs.items():
        full = x @ weights[name].T + (biases[name] if bias else 0)
        torch.testing.assert_close(torch.cat(parts, -1), full)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows(ranks: int) -> None:
    """The ranks' products add up to the full one; the bias is whole on each."""
    weight, bias, x = filled(5, 8), filled(5), filled(3, 8)
    total = torch.zeros(3, 5)
    for rank in range(ranks):
        module = RowLinear(8, 5, True, Shard(rank, ranks))
        load(module, "", weight, bias)
        assert torch.equal(module.bias, bias)
        share = x[:, rank * 8 // ranks : (rank + 1) * 8 // ranks]
        total += module(share) - bias
    torch.testing.assert_close(total + bias, x @ weight.T + bias)


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="k=4 is not divisible by 3"):
        PackedColumnLinear(6, {"q": 9, "k": 4}, False, Shard(0, 3))
    with pytest.raises(ValueError, match="in_features=8 is not divisible by 3"):
        RowLinear(8, 5, False, Shard(1, 3))


@pytest.mark.parametrize("shape", [(5, 7), (6, 5), (5,), (), (5, 6, 1)])
def test_wrong_shapes_are_named(shape: tuple[int, ...]) -> None:
    for module, part in (
        (Linear(6, 5, False), ""),
        (PackedColumnLinear(6, {"q": 5, "k": 5}, False, Shard()), "k"),
        (RowLinear(6, 5, False, Shard()), ""),
        (Embedding(5, 6), ""),
    ):
        before = module.weight.data.zero_().clone()
        with pytest.raises(ValueError, match=r"shape .* where \(5, 6\) is expected"):
            module.weight_loader(module.weight, torch.ones(shape), part)
        assert torch.equal(module.weight, before)


def test_unknown_part_is_named() -> None:
    module = PackedColumnLinear(6, SIZES, False, Shard())
    with pytest.raises(ValueError, match="'gate' is not one of"):
        module.weight_loader(module.weight, torch.ones(8, 6), "gate")


def test_loading_converts() -> None:
    norm = NormWeight(4).to(torch.bfloat16)
    norm.weight_loader(norm.weight, torch.tensor([1.0, 2.0, 3.0, 1.00390625]), "")
    assert norm.weight.dtype == torch.bfloat16 and norm.weight.tolist()[:3] == [1.0, 2.0, 3.0]


def test_embedding() -> None:
    table = filled(7, 3)
    module = Embedding(7, 3)
    module.weight_loader(module.weight, table, "")
    assert torch.equal(module(torch.tensor([6, 0, 6])), table[[6, 0, 6]])
