"""`minivllm course try ch02`: a student's units at work, with the shapes of what goes in and out.

Owns the tracing of calls and nothing else; it grades nothing. It runs each task's worked example
and, with `interactive`, hands over a prompt where the units can be called by hand.
"""

from __future__ import annotations

import code
import doctest
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from minivllm.course.binding import units
from minivllm.course.loading import location
from minivllm.course.table import Course


def describe(value: Any) -> str:
    """`[4, 64] float32` for a tensor, the value itself for small things."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return f"({', '.join(describe(v) for v in value)})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def traced(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, printing one line of shapes a call."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = inspect.signature(function).bind(*args, **kwargs).arguments
        except TypeError:
            bound = {str(index): value for index, value in enumerate(args)}
        shown = ", ".join(f"{k}={describe(v)}" for k, v in bound.items() if k != "self")
        result = function(*args, **kwargs)
        print(f"    # {name}({shown}) -> {describe(result)}")
        return result

    return call


def traced_unit(value: Any, name: str) -> Any:
    """A function with its calls traced, or a subclass with its public methods traced."""
    if not isinstance(value, type):
        return traced(value, name)
    methods = {
        key: traced(item, f"{name}.{key}")
        for key, item in vars(value).items()
        if inspect.isfunction(item) and not key.startswith("_")
    }
    return type(value.__name__, (value,), methods)


def run_sandbox(course: Course, chapter_name: str, impl: str, interactive: bool) -> int:
    """Print each example of the chapter with its shapes. Returns 1 if something raised."""
    chapter = course.chapter(chapter_name)
    bound = units(impl, [chapter.id], course)
    names: dict[str, Any] = {"torch": torch, **vars(bound.before[chapter.id])}
    for unit in bound.table.values():
        if unit.value is None:
            reason = unit.problem or "it uses something that exercises may not use"
            print(f"{unit.name} cannot be tried: {reason}")
            return 1
        names[unit.name] = traced_unit(unit.value, unit.name)
    failed = False
    for task in chapter.tasks:
        print(f"{task.id}  {', '.join(task.units)}")
        failed |= _run_example(task.example, names, bound.of(task).file)
    if interactive:
        code.interact(banner=f"names: {', '.join(names)}", local=names, exitmsg="")
    return int(failed)


def _run_example(example: str, names: dict[str, Any], file: Any) -> bool:
    for step in doctest.DocTestParser().get_examples(example):
        print(f"    >>> {step.source.rstrip()}".replace("\n", "\n    ... "))
        try:
            exec(compile(step.source, "<example>", "single"), names)
        except Exception as error:
            where = f" ({file.path.name}{location(error, file.path)})" if file else ""
            print(f"    {type(error).__name__}: {error}{where}", file=sys.stdout)
            return True
    return False
