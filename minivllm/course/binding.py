"""From names to functions: whose code stands for each unit.

Owns `units`, the one place behind --impl, --chain, --engine and the notebooks' `use="mine"`. Never
patches anything: earlier units reach a student's file through `given`, everything else is passed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from minivllm.course.given import PLUMBING
from minivllm.course.loading import LoadedFile, load_file
from minivllm.course.mistakes import find_mistake
from minivllm.course.source import GIVEN
from minivllm.course.table import Chapter, Course, Task, load_course

MINE, REFERENCE = "mine", "reference"


@dataclass(frozen=True)
class Unit:
    """One object that a chapter defines: a function, or a class with one or more methods."""

    name: str
    chapter: str
    owner: str  # "mine" for whatever --impl names, "reference" for the package's own
    value: Any = None
    problem: str = ""  # why there is no value
    file: LoadedFile | None = None


@dataclass(frozen=True)
class Units:
    """The units of some chapters, by the names that course.toml gives them."""

    impl: str
    course: Course
    files: tuple[LoadedFile, ...]
    table: Mapping[str, Unit]  # of the chapters asked for
    before: Mapping[str, SimpleNamespace]  # chapter -> the units of all earlier ones

    def of(self, task: Task) -> Unit:
        """The object that holds a task's unit."""
        return self.table[f"{task.chapter}/{task.name}"]

    def seated(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """The tasks' objects by the name that their program knows them by.

        That is the seat's name in the engine (`LLM(parts=...)`), the object's own in a stage. A
        later chapter's class replaces an earlier one in the same seat: it is built on it.
        """
        found = {}
        for task in tasks:
            kind, _, name = task.seat.partition(":")
            found[task.name if kind == "stage" else name] = self.of(task).value
        return found


def units(
    impl: str | Path,
    chapters: Sequence[str] | None = None,
    course: Course | None = None,
    chain: bool | Collection[str] = False,
) -> Units:
    """Bind the units of `chapters` (all by default).

    impl: "exercises", "solutions", "reference", a folder or file of answers, or
    "mistake:ch02.1:NAME". Earlier chapters come from the reference, with `chain` from `impl` too
    (True: all of them, or the ids of those that do).
    Files are loaded anew at each call. ValueError for a chapter or impl that does not exist.
    """
    course = course or load_course()
    chosen = [course.chapter(name) for name in chapters or [c.id for c in course.chapters]]
    files: dict[str, LoadedFile] = {}
    table: dict[str, Unit] = {}
    before: dict[str, SimpleNamespace] = {}
    earlier: dict[str, Any] = {}
    last = max(chapter.id for chapter in chosen)
    for chapter in course.chapters:
        if chapter.id > last:
            break  # later chapters may need what is not installed here
        before[chapter.id] = SimpleNamespace(**earlier)
        reference = {name: _reference(chapter, name) for name in chapter.names}
        bound = reference
        chained = chapter.id in chain if isinstance(chain, Collection) else chain
        if chapter in chosen or chained:
            bound, file = _bind(str(impl), course, chapter, reference, earlier)
            if file is not None:
                files[chapter.id] = file
        if chapter in chosen:
            table.update({f"{chapter.id}/{name}": unit for name, unit in bound.items()})
        source = bound if chained else reference
        earlier |= {name: _usable(unit, chapter) for name, unit in source.items()}
    return Units(str(impl), course, tuple(files.values()), table, before)


def is_named(impl: str) -> bool:
    """Whether `impl` is a word of ours, and not a path."""
    return impl in ("exercises", "solutions", REFERENCE) or impl.startswith("mistake:")


def check_impl(impl: str) -> None:
    """ValueError if `impl` names nothing; the mistakes of the grader's own tests pass."""
    if not is_named(impl) and not Path(impl).exists():
        raise ValueError(
            f"--impl {impl!r} is neither exercises, solutions, reference nor an existing path"
        )


def answer_path(impl: str, course: Course, chapter: Chapter) -> Path:
    """The file that `impl` means for a chapter."""
    if impl in ("exercises", "solutions"):
        return course.root / impl / chapter.file
    check_impl(impl)
    path = Path(impl)
    return path / chapter.file if path.is_dir() else path


def _bind(
    impl: str,
    course: Course,
    chapter: Chapter,
    reference: dict[str, Unit],
    earlier: dict[str, Any],
) -> tuple[dict[str, Unit], LoadedFile | None]:
    if impl == REFERENCE:
        return reference, None
    if impl.startswith("mistake:"):
        _, task_id, name = impl.split(":", 2)
        task = course.task(task_id)
        if task.chapter != chapter.id:
            return reference, None
        wrong = Unit(task.name, chapter.id, MINE, find_mistake(task_id, name).unit)
        return {**reference, task.name: wrong}, None
    path = answer_path(impl, course, chapter)
    # A single file answers for its own chapter only.
    if Path(impl).is_file() and not path.name.startswith(chapter.id):
        return reference, None
    file = load_file(path, chapter, _given(course, chapter, reference, earlier))
    return {name: _from_file(file, chapter, name) for name in chapter.names}, file


def _from_file(file: LoadedFile, chapter: Chapter, name: str) -> Unit:
    if file.module is None:
        return Unit(name, chapter.id, MINE, problem=file.problem, file=file)
    value = getattr(file.module, name, None)
    problem = "" if callable(value) else f"{file.path.name} defines no {name}"
    return Unit(name, chapter.id, MINE, value, problem, file)


def _reference(chapter: Chapter, name: str) -> Unit:
    source = next(task.source for task in chapter.tasks if task.name == name)
    return Unit(name, chapter.id, REFERENCE, getattr(import_module(source), name))


def _usable(unit: Unit, chapter: Chapter) -> Any:
    """The unit for a later chapter's use; a broken one raises as a stub does."""
    if unit.value is not None:
        return unit.value
    task = next(task.id for task in chapter.tasks if task.name == unit.name)

    def unavailable(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{task}: {unit.problem or 'not allowed as it is'}")

    return unavailable


def _given(
    course: Course, chapter: Chapter, reference: dict[str, Unit], earlier: dict[str, Any]
) -> ModuleType:
    """What `from minivllm.course.given import ...` yields inside one chapter's file.

    Earlier units and plumbing; of a class that the chapter extends, a form without its answers.
    """
    blanked = {
        name: _without_answers(reference[name].value, chapter, name) for name in chapter.extends
    }
    # A class begun in an earlier chapter and continued here: built on the earlier answer.
    for name in chapter.extends:
        if name in earlier:
            blanked[name] = _without_answers(earlier[name], chapter, name)
    module = ModuleType(GIVEN)

    def find(name: str) -> Any:
        for table in (blanked, earlier):
            if name in table:
                return table[name]
        if name in PLUMBING:
            return getattr(import_module(PLUMBING[name]), name)
        raise AttributeError(f"{GIVEN} has no {name!r} for {chapter.id}")

    module.__dict__["__getattr__"] = find
    return module


def _without_answers(cls: type, chapter: Chapter, name: str) -> type:
    """A subclass whose methods of this chapter raise, so that `super()` gives nothing away."""

    def gap(task: Task, unit: str) -> Any:
        def raises(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{task.id}: {unit}")

        return raises

    gaps = {
        unit.partition(".")[2]: gap(task, unit)
        for task in chapter.tasks
        if task.name == name
        for unit in task.units
    }
    return type(name, (cls,), gaps)
