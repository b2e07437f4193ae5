"""Compares an answer with what was expected: exact kind first, values last.

Owns the judgement. The functions it computes with are bound when this module is imported, before
any student's file is loaded, so that a patched `torch.allclose` judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_Tensor = torch.Tensor
_detach, _to, _numpy, _clone = (
    torch.Tensor.detach,
    torch.Tensor.to,
    torch.Tensor.numpy,
    torch.Tensor.clone,
)
_cpu, _float64 = torch.device("cpu"), torch.float64
_abs, _argwhere, _isnan, _errstate = np.abs, np.argwhere, np.isnan, np.errstate


@dataclass(frozen=True)
class Difference:
    """How an answer departs from what was expected."""

    category: str  # "type", "shape", "dtype", "device", "nan", "values"
    text: str
    ratio: float = math.inf  # largest error over allowed error, for the margins test


def to_float64(tensor: torch.Tensor) -> np.ndarray:
    """A copy as float64 NumPy, whatever its dtype and device. NumPy has no bfloat16."""
    return np.array(_numpy(_to(_detach(tensor), _cpu, _float64)))


def snapshot(value: Any) -> Any:
    """A copy that later changes in place do not reach."""
    if type(value) is _Tensor:
        return _clone(_detach(value))
    if type(value) in (list, tuple):
        return type(value)(snapshot(item) for item in value)
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    return value


def error_ratio(actual: Any, expected: Any, tolerance: Mapping[str, float]) -> float:
    """Largest error over allowed error of two values of one kind; infinity if kinds differ."""
    found: list[float] = [0.0]
    difference = _compare(actual, expected, tolerance, "", found)
    return difference.ratio if difference else max(found)


def compare(actual: Any, expected: Any, tolerance: Mapping[str, float]) -> Difference | None:
    """None if `actual` is right.

    Tensors: same type, shape, dtype and device, then |a - e| <= tol * (1 + |e|) with the dtype's
    tolerance (exact for integers). Containers by exact type and item; all else by `==`.
    """
    return _compare(actual, expected, tolerance, "", [])


def _compare(
    actual: Any, expected: Any, tolerance: Mapping[str, float], where: str, ratios: list[float]
) -> Difference | None:
    if actual is None and expected is not None:
        return Difference("type", f"returned None{where}: is a return missing?")
    # Exact type: an object that claims to equal everything gets no further.
    if type(actual) is not type(expected):
        text = f"returned {_kind(actual)}{where}, expected {_kind(expected)}"
        return Difference("type", text)
    if isinstance(expected, _Tensor):
        return _compare_tensors(actual, expected, tolerance, where, ratios)
    if type(expected) in (list, tuple):
        if len(actual) != len(expected):
            text = f"returned {len(actual)} items{where}, expected {len(expected)}"
            return Difference("shape", text)
        pairs: Any = [(i, a, e) for i, (a, e) in enumerate(zip(actual, expected))]
    elif type(expected) is dict:
        if actual.keys() != expected.keys():
            text = f"has the keys {_names(actual)}{where}, expected {_names(expected)}"
            return Difference("values", text)
        pairs = [(repr(key), actual[key], value) for key, value in expected.items()]
    elif type(expected) is float:
        same = actual == expected or math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-12)
        return None if same else Difference("values", f"{actual!r}{where}, expected {expected!r}")
    else:
        same = actual == expected
        return None if same else Difference("values", f"{actual!r}{where}, expected {expected!r}")
    for index, a, e in pairs:
        difference = _compare(a, e, tolerance, f"{where or ' at '}[{index}]", ratios)
        if difference:
            return difference
    return None


def _compare_tensors(
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: Mapping[str, float],
    where: str,
    ratios: list[float],
) -> Difference | None:
    for category in ("shape", "dtype", "device"):
        a, e = getattr(actual, category), getattr(expected, category)
        if a != e:
            a, e = (list(a), list(e)) if category == "shape" else (a, e)
            return Difference(category, f"has {category} {a}{where}, expected {e}")
    name = str(expected.dtype).removeprefix("torch.")
    exact = not expected.dtype.is_floating_point
    if not exact and name not in tolerance:
        raise ValueError(f"course.toml gives this task no tolerance for {name}")
    a64, e64 = to_float64(actual), to_float64(expected)
    allowed = np.zeros_like(e64) if exact else tolerance[name] * (1 + _abs(e64))
    with _errstate(all="ignore"):
        # Equal infinities differ by NaN, so equality comes first; NaN where expected is right too.
        error = np.where((a64 == e64) | (_isnan(a64) & _isnan(e64)), 0.0, _abs(a64 - e64))
        error = np.where(_isnan(error), math.inf, error)
        ratio = np.where(error == 0, 0.0, error / np.maximum(allowed, 1e-300))
        # NaN or infinity on the expected side (a mistake's answer, in a diagnosis) allows nothing.
        ratio = np.where(_isnan(ratio), math.inf, ratio)
    worst = float(ratio.max()) if ratio.size else 0.0
    ratios.append(worst)
    if worst <= 1:
        return None
    return _values_text(a64, e64, error, allowed, ratio, where)


def _values_text(
    actual: np.ndarray,
    expected: np.ndarray,
    error: np.ndarray,
    allowed: np.ndarray,
    ratio: np.ndarray,
    where: str,
) -> Difference:
    bad = _argwhere(ratio > 1)
    first = tuple(int(i) for i in bad[0])
    at = f"{where or ' at '}{list(first)}"
    category = "nan" if _isnan(actual[first]) else "values"
    text = f"{actual[first]:.6g}{at}, expected {expected[first]:.6g}"
    if math.isfinite(error[first]):
        text += f" (error {error[first]:.1e}, allowed {allowed[first]:.1e})"
    text += f"; {len(bad)} of {ratio.size} values are wrong"
    return Difference(category, text, float(ratio.max()))


def _names(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(map(repr, keys))) or "(none)"


def _kind(value: Any) -> str:
    """`a tuple of 2`, `a Tensor`: enough to see what came instead."""
    if value is None:
        return "None"
    count = f" of {len(value)}" if type(value) in (list, tuple) else ""
    return f"a {type(value).__name__}{count}"
