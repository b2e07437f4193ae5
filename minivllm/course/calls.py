"""Remembers how a test called a unit, so that a failure shows the call that failed.

Owns the wrapper around a unit and the words for its arguments: small values in full, large tensors
by dtype and shape. Arguments are described before the call, which may change them. A class is left
as it is: it has no one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch

FULL = 30  # numbers of a tensor that are shown: more than any that a test writes out
SHOWN = 4  # calls that are shown where any of them may have failed
WIDTH = 60  # characters of any other value


class Calls:
    """The calls of one unit within one question."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def of(self, unit: Any) -> Any:
        """`unit`, with its calls remembered."""
        if not inspect.isfunction(unit):
            return unit
        names = list(inspect.signature(unit).parameters)

        @wraps(unit)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen.append(_described(names, args, kwargs))
            return unit(*args, **kwargs)

        return call

    def text(self, raised: bool) -> str:
        """The call that raised, or all that the answer was made of, if they are few."""
        count = len(self.seen)
        if raised and count > 1:
            return f"call {count}: {self.seen[-1]}"
        if count > SHOWN:
            return f"{count} calls"
        if count == 1:
            return self.seen[0]
        return "\n".join(f"call {number}: {text}" for number, text in enumerate(self.seen, 1))


def _described(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    labels = [*names, *(f"argument {i + 1}" for i in range(len(names), len(args)))]
    pairs = [*zip(labels, args), *kwargs.items()]
    return ", ".join(f"{name} = {_value(value)}" for name, value in pairs)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if value.numel() > FULL:
            return f"{kind} {list(value.shape)}"
        return f"{kind} {_rounded(value.detach().tolist())}"
    if isinstance(value, float):
        return _rounded(value)
    if callable(value) or type(value).__repr__ is object.__repr__:
        return str(getattr(value, "__name__", f"a {type(value).__name__}"))
    if inspect.isgenerator(value):
        return "a generator"
    text = repr(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _rounded(value: Any) -> str:
    """A number, or the nested lists of a tensor's, to six digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
