"""The kill table: every mistake against every task of its chapter, in one process.

Owns the running of the visible tests on each typical mistake and the judgement whether exactly its
own task fails, with a text that names it. `python -m minivllm.course kill-table` prints it.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from minivllm.course import pytest_plugin
from minivllm.course.diagnosis import Trail, observe, same_outcome
from minivllm.course.grading import Grading
from minivllm.course.mistakes import Mistake, load_mistakes
from minivllm.course.results import PASS, WRONG, TaskResult
from minivllm.course.table import Chapter, Course


@dataclass(frozen=True)
class Kill:
    """What the tests of a chapter said to one mistake."""

    mistake: Mistake
    results: tuple[TaskResult, ...]
    named: bool  # its failure text names it
    trail: Trail | None

    @property
    def fault(self) -> str:
        """What is wrong with the tests or the mistake; empty when all is as it should be."""
        expected = {self.mistake.task, *self.mistake.also_fails}
        failing = {result.id for result in self.results if result.state != PASS}
        if self.mistake.task not in failing:
            return "survives: no test fails"
        if failing != expected:
            return f"fails {sorted(failing)}, expected {sorted(expected)}"
        states = {result.id: result.state for result in self.results}
        if states[self.mistake.task] != WRONG:
            return f"is {states[self.mistake.task]}, not wrong"
        return "" if self.named else "the failure text does not name it"


class _Keep:
    """A plugin that keeps the grading of a nested run."""

    grading: Grading | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.grading = session.config.stash.get(pytest_plugin.GRADING, None)


def grade_here(
    course: Course,
    chapter: Chapter,
    impl: str,
    options: Sequence[str] = (),
    plugins: Sequence[object] = (),
) -> tuple[Grading, str]:
    """Run a chapter's visible tests in this process. Returns the grading and pytest's output."""
    keep = _Keep()
    file = course.root / "exercises" / chapter.test_file
    command = ["-q", "-p", "no:cacheprovider", "-p", "minivllm.course.pytest_plugin"]
    command += ["--import-mode=importlib"]
    # Left out for speed only: two garbage collections a run, and tracebacks nobody reads.
    command += ["-p", "no:unraisableexception", "-p", "no:hypothesispytest", "--tb=native"]
    command += ["--rootdir", str(course.root), str(file), "--impl", impl, *options]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(command, plugins=[keep, *plugins])
    if keep.grading is None or code not in (0, 1):
        raise RuntimeError(f"the tests of {chapter.id} did not run:\n{output.getvalue()}")
    return keep.grading, output.getvalue()


def kill_chapter(course: Course, chapter: Chapter) -> list[Kill]:
    """One row a mistake."""
    kills = []
    for mistake in load_mistakes(chapter.id):
        grading, _ = grade_here(course, chapter, f"mistake:{mistake.task}:{mistake.name}")
        results = tuple(grading.results())
        own = next(result for result in results if result.id == mistake.task)
        named = f'"{mistake.name}"' in own.text
        kills.append(Kill(mistake, results, named, grading.trails.get(mistake.task)))
    return kills


def twins(course: Course, chapter: Chapter) -> list[tuple[str, str, str]]:
    """Pairs of a task's mistakes that agree on everything its tests ask: one of them is useless.

    The questions are those of a run of the reference, where no test stops early.
    """
    grading, _ = grade_here(course, chapter, "reference")
    found = []
    for task in chapter.tasks:
        steps = grading.trails[task.id].steps
        known = [mistake for mistake in load_mistakes(chapter.id) if mistake.task == task.id]
        answers = {m.name: [observe(step.probe, m.unit) for step in steps] for m in known}
        for one, other in combinations(answers, 2):
            pairs = zip(answers[one], answers[other])
            if all(same_outcome(a, b, task.tolerance) for a, b in pairs):
                found.append((task.id, one, other))
    return found


def table_lines(chapter: Chapter, kills: Sequence[Kill]) -> list[str]:
    """The table as text: one row a mistake, one column a task; X where it fails."""
    width = max((len(kill.mistake.name) for kill in kills), default=0)
    head = "  ".join(task.id for task in chapter.tasks)
    lines = [f"{chapter.id} {chapter.title}", f"{'':<{width}}  {head}  tests  fault"]
    for kill in kills:
        marks = "  ".join(f"{'.' if r.state == PASS else 'X':^6}" for r in kill.results)
        own = next(r for r in kill.results if r.id == kill.mistake.task)
        failing = sum(test.state != PASS for test in own.tests)
        row = f"{kill.mistake.name:<{width}}  {marks}  {failing:>2}/{len(own.tests):<2}"
        lines.append(f"{row}  {kill.fault}".rstrip())
    return lines


def main(course: Course, chapters: Sequence[str], target: Path | None) -> int:
    """Print the table of the chapters (all by default); 1 if any row has a fault."""
    chosen = [course.chapter(name) for name in chapters] or list(course.chapters)
    rows, faults = [], 0
    for chapter in chosen:
        kills = kill_chapter(course, chapter)
        print("\n".join(table_lines(chapter, kills)))
        faults += sum(bool(kill.fault) for kill in kills)
        for task, one, other in twins(course, chapter):
            faults += 1
            print(f'{task}: "{one}" and "{other}" agree on all that the tests ask')
        rows += [{"task": k.mistake.task, "name": k.mistake.name, "fault": k.fault} for k in kills]
    print(f"{len(rows)} mistakes, {faults} faults")
    if target:
        target.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(faults > 0)
