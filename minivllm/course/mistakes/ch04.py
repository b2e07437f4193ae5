# mypy: ignore-errors
"""Chapter 04, causal GQA attention: what people write instead.

Most differ from the right answer in one step, so they share a body with that step as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from minivllm.course.mistakes import mistake
from minivllm.ops.attention import attention

Tensor = torch.Tensor
NEVER = float("-inf")


def _future(q: Tensor, k: Tensor, q_start: int) -> Tensor:
    """Which keys lie behind each query, [Tq, Tk]."""
    return torch.arange(k.shape[0])[None, :] > (torch.arange(q.shape[0]) + q_start)[:, None]


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    future: Tensor,
    masked: float = NEVER,
    normalise: Callable[[Tensor], Tensor] = _softmax,
) -> Tensor:
    """The right steps with another mask, masked score or softmax; result in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    return torch.einsum("hqk,khd->qhd", normalise(scores.masked_fill(future, masked)), v)


@mistake(
    "ch04.1",
    "mask aligned top-left",
    "row i of the mask lets i + 1 keys through, as if the queries began at position 0. Query i is "
    "at position q_start + i: the mask must be aligned by position.",
)
def mask_top_left(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, _future(q, k, 0)).to(q.dtype)


@mistake(
    "ch04.1",
    "mask aligned bottom-right",
    "the mask is laid so that the last query sees the last key (Tk - Tq) and q_start is not used; "
    "with keys behind the last query that lets the future in.",
)
def mask_bottom_right(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, _future(q, k, k.shape[0] - q.shape[0])).to(q.dtype)


@mistake(
    "ch04.1",
    "no mask",
    "every query sees every key, later ones too.",
    engine_visible=True,
)
def no_mask(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, torch.zeros_like(_future(q, k, 0))).to(q.dtype)


@mistake(
    "ch04.1",
    "sees the next token",
    "the mask is one key too wide: a query sees the token after its own.",
    engine_visible=True,
)
def sees_next(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, _future(q, k, q_start + 1)).to(q.dtype)


@mistake(
    "ch04.1",
    "does not see itself",
    "the mask is one key too narrow: a query sees its own position too, and the first one would "
    "have nothing to read (NaN).",
    engine_visible=True,
)
def blind_to_itself(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, _future(q, k, q_start - 1)).to(q.dtype)


@mistake(
    "ch04.1",
    "mask inverted",
    "the mask keeps the future and drops the past.",
    engine_visible=True,
)
def mask_inverted(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, ~_future(q, k, q_start)).to(q.dtype)


@mistake(
    "ch04.1",
    "zero for minus infinity",
    "masked scores are set to 0, which is a score like any other; exp makes it 1. Set them to "
    "minus infinity.",
    engine_visible=True,
)
def masked_to_zero(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, _future(q, k, q_start), masked=0.0).to(q.dtype)


@mistake(
    "ch04.1",
    "finite mask",
    "masked scores are set to -1000: where all the others are below that, the future wins. Minus "
    "infinity is below every score.",
)
def finite_mask(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, _future(q, k, q_start), masked=-1000.0).to(q.dtype)


@mistake(
    "ch04.1",
    "finite mask, larger",
    "masked scores are set to -10000: where all the others are below that, the future wins. Minus "
    "infinity is below every score.",
)
def larger_finite_mask(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return _attend(q, k, v, scale, _future(q, k, q_start), masked=-10000.0).to(q.dtype)


@mistake(
    "ch04.1",
    "mask after softmax",
    "the softmax shares out to the future too, and those shares are then dropped: the rest no "
    "longer sums to one. Mask the scores, before the softmax.",
    engine_visible=True,
)
def mask_after_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    future = _future(q, k, q_start)
    return _attend(
        q,
        k,
        v,
        scale,
        torch.zeros_like(future),
        normalise=lambda scores: scores.softmax(dim=-1).masked_fill(future, 0.0),
    ).to(q.dtype)


@mistake(
    "ch04.1",
    "softmax over the queries",
    "the softmax runs over the queries; each query shares out over its keys, the last axis of "
    "[Hq, Tq, Tk].",
    engine_visible=True,
)
def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    future = _future(q, k, q_start)
    return _attend(q, k, v, scale, future, normalise=lambda s: s.softmax(dim=-2)).to(q.dtype)


@mistake(
    "ch04.1",
    "no max subtraction",
    "exp(score) is infinite from a score of 89 on, and infinity over infinity is NaN. Subtract "
    "each row's maximum first (torch.softmax does).",
)
def no_max_subtraction(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    def normalise(scores: Tensor) -> Tensor:
        return scores.exp() / scores.exp().sum(dim=-1, keepdim=True)

    return _attend(q, k, v, scale, _future(q, k, q_start), normalise=normalise).to(q.dtype)


@mistake(
    "ch04.1",
    "scale missing",
    "the scores are not multiplied by scale, so the softmax is far too sharp.",
    engine_visible=True,
)
def scale_missing(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return attention(q, k, v, 1.0, q_start)


@mistake(
    "ch04.1",
    "divided by scale",
    "the scores are divided by scale; scale is 1 / sqrt(D) already, so they are multiplied.",
    engine_visible=True,
)
def divided_by_scale(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return attention(q, k, v, 1.0 / scale, q_start)


@mistake(
    "ch04.1",
    "scale of its own",
    "it uses 1 / sqrt(D) whatever scale is; some models want another one.",
)
def own_scale(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return attention(q, k, v, 1 / math.sqrt(q.shape[-1]), q_start)


@mistake(
    "ch04.1",
    "repeat for repeat_interleave",
    "the KV heads are laid out 0, 1, 0, 1, ... (repeat); query head h reads KV head h // group, so "
    "they must come as 0, 0, 1, 1, ... (repeat_interleave).",
    engine_visible=True,
)
def repeated(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(1, group, 1), v.repeat(1, group, 1), scale, q_start)


@mistake(
    "ch04.1",
    "keys and values of other heads",
    "the keys are repeated head by head and the values as a whole, so a query weighs the values of "
    "one KV head by the keys of another.",
    engine_visible=True,
)
def values_repeated(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return attention(q, k.repeat_interleave(group, 1), v.repeat(1, group, 1), scale, q_start)


@mistake(
    "ch04.1",
    "first KV head for all",
    "all query heads read KV head 0; the others are never used.",
    engine_visible=True,
)
def first_kv_head(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return attention(q, k[:, :1], v[:, :1], scale, q_start)


@mistake(
    "ch04.1",
    "scores in half precision",
    "the products are taken in q.dtype, and float16 ends at 65504. Convert q and k to float32 "
    "before multiplying.",
)
def half_scores(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(group, dim=1), v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, wide_k).float() * scale
    scores = scores.masked_fill(_future(q, k, q_start), NEVER)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), wide_v).to(q.dtype)


@mistake(
    "ch04.1",
    "stays float32",
    "scores and softmax are float32, but the result goes back to q.dtype.",
)
def stays_float32(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return attention(q.float(), k.float(), v.float(), scale, q_start)


@mistake(
    "ch04.1",
    "q overwritten",
    "it scales q in place; q belongs to the caller.",
)
def q_overwritten(q: Tensor, k: Tensor, v: Tensor, scale: float, q_start: int) -> Tensor:
    return attention(q.mul_(scale), k, v, 1.0, q_start)
