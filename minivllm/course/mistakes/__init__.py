"""Typical wrong answers, as whole functions with the unit's signature.

Owns the record and the look-up; `chNN.py` beside this file holds each chapter's list. The list
serves twice: the grader's tests demand that each of them fails, and a student's failure is compared
with them to say what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """One wrong answer."""

    task: str
    name: str  # short: "no eps"
    message: str  # what it did and what is right, a sentence for the student
    unit: Any  # the function, or a subclass of the reference for a class
    engine_visible: bool = False  # the tiny model's output shows it, so --engine must fail
    also_fails: tuple[str, ...] = ()  # sibling tasks that cannot pass with it either

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Mistakes may build on one another."""
        return self.unit(*args, **kwargs)


def mistake(
    task: str,
    name: str,
    message: str,
    engine_visible: bool = False,
    also_fails: tuple[str, ...] = (),
) -> Callable[[Any], Mistake]:
    """Decorator that turns a wrong function or class into a `Mistake`."""
    return lambda unit: Mistake(task, name, message, unit, engine_visible, also_fails)


def load_mistakes(chapter: str) -> list[Mistake]:
    """The chapter's mistakes in the order of its file; none if there is no file (yet)."""
    name = f"{__name__}.{chapter}"
    if find_spec(name) is None:
        return []
    return [value for value in vars(import_module(name)).values() if isinstance(value, Mistake)]


def find_mistake(task: str, name: str) -> Mistake:
    """The mistake called `name`; ValueError names the task's others."""
    known = [m for m in load_mistakes(task.partition(".")[0]) if m.task == task]
    for entry in known:
        if entry.name == name:
            return entry
    raise ValueError(f"{task} has no mistake {name!r}; there are: {[m.name for m in known]}")
