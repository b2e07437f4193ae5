"""`exercises/course.toml` as typed, frozen records.

Owns the reading and checking of the table: chapters, tasks, points, seats, tolerances, contracts.
Never imports torch or a student's file. Every other module of the course takes its facts from here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from minivllm.course.root import TABLE, find_root

SEAT_KINDS = ("op", "part", "stage")
DEVICES = ("cpu", "cuda")
STUDENT = "student"


@dataclass(frozen=True)
class Task:
    """One gradable gap, the table `[chNN.K]`."""

    id: str  # "ch02.1"
    units: tuple[str, ...]  # what is written: "rms_norm", or "BlockManager.append"
    source: str  # the module that holds the reference
    seat: str  # "op:NAME" or "part:NAME" of LLM(parts=...); "stage:NAME", a unit of the stages
    points: int  # all or nothing
    todos: tuple[str, ...]  # one line for each unit, shown in its stub
    contracts: tuple[str, ...]  # docstring of each unit's stub
    example: str  # doctest, shown in the stub and run as a test
    tolerance: Mapping[str, float]  # by dtype: error <= tolerance * (1 + |expected|)
    forbidden: tuple[str, ...] = ()  # dotted names that would do the task's work
    device: str = "cpu"
    bonus: bool = False  # on top of the course's 100 points

    @property
    def chapter(self) -> str:
        return self.id.partition(".")[0]

    @property
    def name(self) -> str:
        """The object a file must define: the function, or the class that holds the method."""
        return self.units[0].partition(".")[0]


@dataclass(frozen=True)
class Chapter:
    """One chapter, the table `[chNN]`."""

    id: str  # "ch02"
    slug: str
    title: str
    minutes: int
    goal: str
    unlocks: str  # what a solved chapter gives, for `course status`
    tasks: tuple[Task, ...]
    imports: tuple[str, ...] = ()  # modules a student may import besides the usual ones
    extends: tuple[str, ...] = ()  # classes written as a subclass of given.NAME

    @property
    def file(self) -> str:
        return f"{self.id}_{self.slug}.py"

    @property
    def test_file(self) -> str:
        return f"test_{self.id}_{self.slug}.py"

    @property
    def lesson(self) -> str:
        return f"{self.id[2:]}_{self.slug}.ipynb"

    @property
    def names(self) -> tuple[str, ...]:
        """The objects the chapter's file defines, each once, in order."""
        return tuple(dict.fromkeys(task.name for task in self.tasks))


@dataclass(frozen=True)
class Course:
    """The whole table."""

    root: Path
    title: str
    version: str
    seed: int
    chapters: tuple[Chapter, ...]
    edition: str = "full"  # "student" in a released tree, which has no authors' commands

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(task for chapter in self.chapters for task in chapter.tasks)

    def chapter(self, name: str) -> Chapter:
        """The chapter called `ch02`, `02` or `2`; ValueError names those that exist."""
        digits = name.lower().removeprefix("ch").partition("_")[0].partition(".")[0]
        wanted = f"ch{digits.zfill(2)}"
        for chapter in self.chapters:
            if chapter.id == wanted:
                return chapter
        known = ", ".join(chapter.id for chapter in self.chapters)
        raise ValueError(f"no chapter {name!r}; there are: {known}")

    def task(self, task_id: str) -> Task:
        """The task called `ch02.1`; ValueError names those that exist."""
        for task in self.tasks:
            if task.id == task_id:
                return task
        known = ", ".join(task.id for task in self.tasks)
        raise ValueError(f"no task {task_id!r}; there are: {known}")

    def select(self, name: str) -> tuple[Task, ...]:
        """The task called `ch02.1`, or all tasks of the chapter `ch02`."""
        return (self.task(name),) if "." in name else self.chapter(name).tasks


def load_course(root: Path | None = None) -> Course:
    """Read and check the table; ValueError names the entry and what is wrong with it."""
    root = root or find_root()
    with open(root / TABLE, "rb") as file:
        table = tomllib.load(file)
    head = table.pop("course")
    chapters = tuple(_chapter(key, table[key]) for key in sorted(table))
    return Course(root=root, chapters=chapters, **head)


def _chapter(key: str, entry: dict[str, Any]) -> Chapter:
    if not re.fullmatch(r"ch\d\d", key):
        raise ValueError(f"course.toml: [{key}] is no chapter: the name must look like ch02")
    numbers = sorted(int(name) for name in entry if name.isdigit())
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"course.toml: the tasks of [{key}] are {numbers}, not 1, 2, 3, ...")
    tasks = tuple(_task(f"{key}.{number}", entry[str(number)]) for number in numbers)
    plain = {name: value for name, value in entry.items() if not name.isdigit()}
    for name in ("imports", "extends"):
        plain[name] = tuple(plain.get(name, ()))
    _refuse_unknown(key, plain, Chapter)
    return Chapter(id=key, tasks=tasks, **plain)


def _task(task_id: str, entry: dict[str, Any]) -> Task:
    values = dict(entry)
    units = values.pop("unit")
    contract = values.pop("contract")
    values["units"] = (units,) if isinstance(units, str) else tuple(units)
    # Several methods in one task give a contract each: a table keyed by the unit's name.
    by_unit = {values["units"][0]: contract} if isinstance(contract, str) else contract
    values["contracts"] = tuple(by_unit[unit].strip("\n") for unit in values["units"])
    todo = values.pop("todo")
    values["todos"] = (todo,) * len(values["units"]) if isinstance(todo, str) else tuple(todo)
    if len(values["todos"]) != len(values["units"]):
        raise ValueError(f"course.toml: [{task_id}] needs a todo for each of {values['units']}")
    values["example"] = values["example"].strip("\n")
    values["forbidden"] = tuple(values.get("forbidden", ()))
    values.setdefault("tolerance", {})
    _refuse_unknown(task_id, values, Task)
    task = Task(id=task_id, **values)
    if task.seat.partition(":")[0] not in SEAT_KINDS:
        raise ValueError(f"course.toml: [{task_id}] seat {task.seat!r} is not {SEAT_KINDS}:NAME")
    if task.device not in DEVICES:
        raise ValueError(f"course.toml: [{task_id}] device {task.device!r} is not in {DEVICES}")
    if len({unit.partition(".")[0] for unit in task.units}) != 1:
        raise ValueError(f"course.toml: [{task_id}] units {task.units} belong to several objects")
    return task


def _refuse_unknown(key: str, values: Mapping[str, Any], record: type) -> None:
    unknown = values.keys() - {field.name for field in fields(record)}
    if unknown:
        raise ValueError(f"course.toml: [{key}] has unknown keys {sorted(unknown)}")
