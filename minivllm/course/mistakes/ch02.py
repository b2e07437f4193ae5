# mypy: ignore-errors
"""Chapter 02, RMSNorm: what people write instead."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.course.mistakes import mistake
from minivllm.ops.norms import rms_norm


@mistake("ch02.1", "no eps", "eps is missing, so small rows are blown up and zeros give NaN.")
def no_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True))).to(x.dtype) * weight


@mistake(
    "ch02.1",
    "eps outside the root",
    "eps is added to the root; it belongs under it, to the mean square.",
)
def eps_outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 / (x32.pow(2).mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight


@mistake(
    "ch02.1",
    "eps outside the root, no float32",
    "two things at once: eps is added to the root and belongs under it, to the mean square; and "
    "a .float() is missing, so float16 squares overflow.",
)
def eps_outside_no_float(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight


@mistake(
    "ch02.1",
    "eps added to the factor",
    "eps is added after the reciprocal root, where it does next to nothing: a row of zeros gives "
    "NaN. It belongs under the root, to the mean square.",
)
def eps_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * (torch.rsqrt(x32.pow(2).mean(-1, keepdim=True)) + eps)).to(x.dtype) * weight


@mistake(
    "ch02.1",
    "mean subtracted",
    "that is LayerNorm. RMSNorm only rescales: it subtracts no mean.",
    engine_visible=True,
)
def mean_subtracted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    x32 = x32 - x32.mean(-1, keepdim=True)
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@mistake(
    "ch02.1",
    "cast late",
    "the squares are taken in x.dtype, where 300 squared overflows float16. "
    "Convert to float32 before squaring, not after.",
)
def cast_late(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = x.pow(2).float().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


@mistake(
    "ch02.1",
    "stays float32",
    "the result must go back to x.dtype after the float32 statistics.",
)
def stays_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.float(), weight.float(), eps)


@mistake(
    "ch02.1",
    "sum for mean",
    "the squares are summed, not averaged: each row comes out smaller by the root of its length.",
    engine_visible=True,
)
def sum_for_mean(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype) * weight


@mistake(
    "ch02.1",
    "root forgotten",
    "rows are divided by the mean square itself; take its root first.",
    engine_visible=True,
)
def root_forgotten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 / (x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@mistake(
    "ch02.1",
    "mean over everything",
    "the mean runs over all rows together, so one token's size changes another's result. "
    "It runs over the last axis only.",
    engine_visible=True,
)
def mean_over_everything(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean() + eps)).to(x.dtype) * weight


@mistake("ch02.1", "weight forgotten", "the result is not scaled by weight.", engine_visible=True)
def weight_forgotten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, torch.ones_like(weight), eps)


@mistake(
    "ch02.1",
    "weight plus one",
    "it scales by 1 + weight, as Gemma's checkpoints want it; these want weight alone.",
    engine_visible=True,
)
def weight_plus_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, 1 + weight, eps)


@mistake(
    "ch02.1",
    "x overwritten",
    "it writes the result into x, which the residual stream still needs.",
    engine_visible=True,
)
def x_overwritten(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.copy_(rms_norm(x, weight, eps))


@mistake(
    "ch02.2",
    "old residual",
    "the second result is the residual that came in; the sum must go on, or this sublayer's "
    "output is lost.",
    engine_visible=True,
)
def old_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms_norm(x + residual, weight, eps), residual


@mistake(
    "ch02.2",
    "normalised residual",
    "the second result is the normalised sum; the residual stream carries the plain sum.",
    engine_visible=True,
)
def normalised_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    y = rms_norm(x + residual, weight, eps)
    return y, y.clone()


@mistake(
    "ch02.2",
    "norm before the sum",
    "x is normalised and the residual added after; add first, then normalise the sum.",
    engine_visible=True,
)
def norm_before_sum(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return rms_norm(x, weight, eps) + residual, x + residual


@mistake(
    "ch02.2",
    "only x normalised",
    "the norm sees x alone; it must see the sum of x and the residual.",
    engine_visible=True,
)
def only_x(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms_norm(x, weight, eps), x + residual


@mistake(
    "ch02.2",
    "results swapped",
    "the order is (normalised, sum).",
    engine_visible=True,
)
def swapped(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, rms_norm(total, weight, eps)


@mistake("ch02.2", "own eps", "it uses an eps of its own and ignores the one passed.")
def own_eps(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, 1e-6), total


@mistake(
    "ch02.2",
    "residual overwritten",
    "it adds into the residual that was passed; return a new tensor instead.",
)
def residual_overwritten(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    residual += x
    return rms_norm(residual, weight, eps), residual
