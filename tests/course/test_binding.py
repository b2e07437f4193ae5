"""Whose code stands for each unit, and what an exercise file may do."""

import sys

import pytest

from course_tools import answer, make_course, solve
from minivllm.course.binding import units
from minivllm.course.loading import load_file

HEADER = "import torch\n"


def violations(course, text, chapter="ch01"):
    answer(course, chapter, text)
    bound = units("exercises", [chapter], course)
    return [(v.line, v.text, v.tasks) for v in bound.files[0].violations]


def test_reference_solutions_and_exercises(tmp_path):
    course = make_course(tmp_path)
    task = course.task("ch01.1")
    assert units("reference", ["ch01"], course).of(task).owner == "reference"
    solved = units("solutions", ["ch01"], course).of(task)
    assert solved.owner == "mine" and solved.value(2, 3) == 6
    with pytest.raises(NotImplementedError, match=r"^ch01\.1: scale"):
        units("exercises", ["ch01"], course).of(task).value(2, 3)


def test_files_are_loaded_afresh_each_time(tmp_path):
    course = make_course(tmp_path)
    task = course.task("ch01.1")
    for result in (1, 2):
        answer(course, "ch01", f"def scale(x, factor): return {result}\n")
        bound = units("exercises", ["ch01"], course)
        assert bound.of(task).value(0, 0) == result
    assert bound.files[0].module.__name__ in sys.modules


def test_impl_may_be_a_folder_or_a_file(tmp_path):
    course = make_course(tmp_path)
    task = course.task("ch01.1")
    path = tmp_path / "ch01_other_style.py"
    path.write_text("def scale(x, factor): return 5\n")
    assert units(str(path), ["ch01"], course).of(task).value(0, 0) == 5
    # A file for one chapter says nothing about another.
    assert units(str(path), ["ch02"], course).of(course.task("ch02.1")).owner == "reference"
    assert "there is no" in units(str(tmp_path), ["ch01"], course).of(task).problem
    with pytest.raises(ValueError, match="nowhere"):
        units("nowhere", ["ch01"], course)


def test_earlier_units_come_from_the_reference_or_with_chain_from_the_student(tmp_path):
    course = make_course(tmp_path)
    solve(course, "ch02", "ch03")
    answer(course, "ch01", "def scale(x, factor): return x * 100\n")
    add, drain = course.task("ch02.1"), course.task("ch03.1")
    plain = units("exercises", ["ch02", "ch03"], course)
    counter = plain.of(add).value()
    counter.add(1.0)
    assert counter.total() == 2.0 and plain.before["ch02"].scale(1, 2) == 2
    chained = units("exercises", ["ch02", "ch03"], course, chain=True)
    counter = chained.of(drain).value()  # ch03's class on ch02's, on ch01's function
    counter.add(1.0)
    assert counter.drain() == 100.0
    # Some chapters only.
    some = units("exercises", ["ch03"], course, chain=["ch02"])
    counter = some.of(drain).value()
    counter.add(1.0)
    assert counter.drain() == 2.0


def test_a_broken_earlier_chapter_blocks_with_its_task(tmp_path):
    course = make_course(tmp_path)
    solve(course, "ch02")
    answer(course, "ch01", "def scale(:\n")
    bound = units("exercises", ["ch02"], course, chain=True)
    with pytest.raises(NotImplementedError, match=r"ch01\.1"):
        bound.of(course.task("ch02.1")).value().add(1.0)


def test_super_gives_no_answer_away(tmp_path):
    course = make_course(tmp_path)
    text = "from minivllm.course import given\nclass Counter(given.Counter):\n    pass\n"
    answer(course, "ch03", text)
    counter = units("exercises", ["ch03"], course).of(course.task("ch03.1")).value()
    assert counter.add(1.0) == 1
    with pytest.raises(NotImplementedError, match=r"ch03\.1"):
        counter.drain()


def test_given_has_nothing_of_this_or_later_chapters(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch02", "from minivllm.course.given import Counter\n")
    unit = units("exercises", ["ch02"], course).of(course.task("ch02.1"))
    assert unit.value is None and "cannot import name 'Counter'" in unit.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def scale(:\n", "line 1: invalid syntax"),
        ("x = 1\ny = 1 / 0\n", "line 2: ZeroDivisionError"),
        ("raise SystemExit(0)\n", "line 1: SystemExit"),
        ("scale = 3\n", "defines no scale"),
        ("", "defines no scale"),
        ("\0", "null bytes"),
    ],
)
def test_broken_files_are_described(tmp_path, text, problem):
    course = make_course(tmp_path)
    answer(course, "ch01", text)
    unit = units("exercises", ["ch01"], course).of(course.task("ch01.1"))
    assert not callable(unit.value) and problem in unit.problem


@pytest.mark.parametrize(
    "text",
    [
        "import os\n",
        "import minivllm.ops.norms\n",
        "from minivllm.course import loading\n",
        "from solutions.ch01_scale import scale\n",
        "from .ch01 import x\n",
        "def scale(x, factor):\n    import importlib\n",
        "eval('1')\n",
        "open('x')\n",
        "x = torch.sys.modules\n",
        "torch.allclose = print\n",
        "setattr(torch, 'allclose', print)\n",
        "getattr(torch, 'all' + 'close')\n",
        "torch.ops.aten.mul(1, 2)\n",
        "from torch import ops\n",
        "getattr(torch, 'ops').aten\n",
        "torch._C._nn\n",
        "(lambda: 0).__globals__\n",
        "del torch.allclose\n",
        "from torch import os\n",
        "from random import _os\n",
        "import random\nrandom._os.getcwd()\n",
        "import collections\ncollections._sys.modules\n",
        "import enum\nenum.bltns.open('x')\n",
        "import pprint\npprint._io.open('x')\n",
        "import timeit\n",
        "import socket\n",
        "import io\n",
    ],
)
def test_doors_are_shut_and_the_file_not_run(tmp_path, text):
    course = make_course(tmp_path)
    assert violations(course, f"{HEADER}{text}")
    assert units("exercises", ["ch01"], course).of(course.task("ch01.1")).value is None


@pytest.mark.parametrize(
    "call",
    [
        "torch.mul(x, factor)",
        "getattr(torch, 'mul')(x, factor)",
        "x.clone().mul_(factor)",
        "t.mul(x, factor)",
        "mul(x, factor)",
    ],
)
def test_forbidden_names_are_found_through_aliases(tmp_path, call):
    course = make_course(tmp_path)
    imports = "import torch\nimport torch as t\nfrom torch import mul\n"
    text = f"{imports}def scale(x, factor):\n    return {call}\n"
    assert "would do this task's work" in violations(course, text)[-1][1]


def test_what_students_usually_write_is_allowed(tmp_path):
    course = make_course(tmp_path)
    text = (
        "import math\nfrom dataclasses import dataclass\nfrom collections import deque\n"
        "import torch\nimport torch.nn.functional as F\n"
        "import copy, random, re\nfrom pprint import pprint\nfrom time import perf_counter\n"
        "@dataclass\nclass Pair:\n    a: int = 0\n"
        "def scale(x, factor):\n    self = Pair()\n    self.a = getattr(self, 'a') + 1\n"
        "    perf_counter()\n    return x * factor\n"
    )
    assert violations(course, text) == []
    assert units("exercises", ["ch01"], course).of(course.task("ch01.1")).value(2, 3) == 6


def test_the_guard_looks_at_the_importing_module_only(tmp_path):
    """A forbidden import that the syntax tree does not show is refused when it happens."""
    course = make_course(tmp_path)
    path = tmp_path / "ch01_x.py"
    path.write_text("def scale(x, factor):\n    return x\n")
    module = load_file(path, course.chapter("ch01"), None).module
    with pytest.raises(ImportError, match="may not import subprocess"):
        module.__builtins__["__import__"]("subprocess")
    __import__("subprocess")
