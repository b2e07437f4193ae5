"""A small course of its own, so that tests of the machinery do not depend on any real chapter.

Three chapters: a function; a class whose methods are two tasks and which uses that function; a
subclass that adds a method. Their source is a module that is written beside the course.
"""

from __future__ import annotations

import sys
from pathlib import Path

from minivllm.course.mistakes import Mistake
from minivllm.course.stubs import StubHistory, build
from minivllm.course.table import Course, load_course

SOURCE = '''"""Units of the fake course."""

from __future__ import annotations

import math
from collections import deque

import torch

LIMIT = 3


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale x."""
    # A comment of the answer.
    return x * factor


class Counter:
    """Keeps the last LIMIT values, each scaled by two."""

    def __init__(self) -> None:
        self.items: deque[float] = deque(maxlen=LIMIT)

    # Above the answer.
    def add(self, value: float) -> int:
        """Add a value."""
        self.items.append(float(scale(torch.tensor(value), 2.0)))
        return len(self.items)

    def total(self) -> float:
        """Sum."""
        return math.fsum(self.items)

    def drain(self) -> float:
        """The sum, and empty."""
        total = self.total()
        self.items.clear()
        return total
'''

TABLE = '''
[course]
title = "fake course"
version = "0.0.1"
seed = 7

[ch01]
slug = "scale"
title = "Scale"
minutes = 5
goal = "Scale."
unlocks = "scaling"
[ch01.1]
unit = "scale"
source = "MODULE"
seat = "op:scale"
points = 1
tolerance = { float32 = 1e-5 }
forbidden = ["torch.mul", ".mul_"]
todo = "multiply"
contract = """x times factor."""
example = """
>>> scale(torch.tensor([1.0]), 3.0)
tensor([3.])
"""

[ch02]
slug = "counter"
title = "Counter"
minutes = 5
goal = "Count."
unlocks = "counting"
[ch02.1]
unit = "Counter.add"
source = "MODULE"
seat = "part:counter"
points = 2
todo = "append"
contract = """Add."""
example = """
>>> Counter().add(1.0)
1
"""
[ch02.2]
unit = "Counter.total"
source = "MODULE"
seat = "part:counter"
points = 3
todo = "sum"
contract = """Sum."""
example = """
>>> Counter().total()
0.0
"""

[ch03]
slug = "drain"
title = "Drain"
minutes = 5
goal = "Drain."
unlocks = "draining"
extends = ["Counter"]
[ch03.1]
unit = "Counter.drain"
source = "MODULE"
seat = "part:counter"
points = 4
todo = "sum and clear"
contract = """Drain."""
example = """
>>> Counter().drain()
0.0
"""
'''

TESTS = {
    "ch01_scale": '''
import pytest, torch

def numbers(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, generator=g)

@pytest.mark.task("ch01.1")
def test_example(check):
    """the example"""
    check.example()

@pytest.mark.task("ch01.1")
def test_product(check):
    """each value times factor"""
    x = check.inputs(numbers)
    check.close((x.double() * 2.5).float(), x, 2.5)

@pytest.mark.task("ch01.1")
def test_stays(check):
    """x stays"""
    check.leaves_inputs_alone(torch.ones(3), 2.0)
''',
    "ch02_counter": '''
import pytest

@pytest.mark.task("ch02.1")
def test_add_example(check):
    """the example"""
    check.example()

@pytest.mark.task("ch02.1")
def test_add_counts(check):
    """at most three are kept"""
    def probe(Counter):
        counter = Counter()
        return [counter.add(1.0) for _ in range(5)]
    check.probe([1, 2, 3, 3, 3], probe)

@pytest.mark.task("ch02.2")
def test_total_example(check):
    """the example"""
    check.example()

@pytest.mark.task("ch02.2")
def test_total(check):
    """the sum of doubled values"""
    def probe(Counter):
        counter = Counter()
        counter.items.extend([1.0, 5.0])
        return counter.total()
    check.probe(6.0, probe)
''',
    "ch03_drain": '''
import pytest

@pytest.mark.task("ch03.1")
def test_drain_example(check):
    """the example"""
    check.example()

@pytest.mark.task("ch03.1")
def test_drain(check):
    """the total, then empty"""
    def probe(Counter):
        counter = Counter()
        counter.add(1.5)
        return [counter.drain(), counter.total()]
    check.probe([3.0, 0.0], probe)
''',
}


def make_course(folder: Path, write_stubs: bool = True) -> Course:
    """Write the fake course to `folder`, importable, with fresh stubs and solutions."""
    module = f"fake_units_{abs(hash(str(folder)))}"
    (folder / f"{module}.py").write_text(SOURCE)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    exercises = folder / "exercises"
    exercises.mkdir()
    (exercises / "course.toml").write_text(TABLE.replace("MODULE", module))
    levels = 'idea = "i"\nshapes = "s"\ncode = "c"\n'
    hints = [f'["{task}"]\n{levels}' for task in ("ch01.1", "ch02.1", "ch02.2", "ch03.1")]
    (exercises / "hints.toml").write_text("\n".join(hints))
    for name, text in TESTS.items():
        (exercises / f"test_{name}.py").write_text(text)
    course = load_course(folder)
    if write_stubs:
        build(course, history=history(course))
    return course


def history(course: Course) -> StubHistory:
    """The fake course's own list of stubs."""
    return StubHistory(course.root / "stub_history")


def answer(course: Course, chapter: str, text: str) -> None:
    """Write a student's file."""
    (course.root / "exercises" / course.chapter(chapter).file).write_text(text)


def solve(course: Course, *chapters: str) -> None:
    """Copy solutions into exercises."""
    for chapter in chapters:
        name = course.chapter(chapter).file
        answer(course, chapter, (course.root / "solutions" / name).read_text())


def wrong(task: str, name: str, unit: object) -> Mistake:
    """A mistake for a monkeypatched list."""
    return Mistake(task, name, f"message of {name}.", unit)
