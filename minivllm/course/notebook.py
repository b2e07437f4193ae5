"""`check("ch02")` in a notebook: the visible tests in a child process, shown as a table.

Owns the table. The child loads the file anew each time, so a saved edit counts at once, and an
endless loop or a crash in it leaves the notebook's kernel alone.
"""

from __future__ import annotations

import html
import os
from dataclasses import dataclass, field
from typing import Any

from minivllm.course.runner import ChildRun, run_tests
from minivllm.course.table import Course, load_course

# Okabe and Ito's palette: told apart by colour-blind readers, and each state has its own sign.
SIGNS = {
    "pass": ("✓", "#009E73"),
    "wrong": ("✗", "#D55E00"),
    "todo": ("○", "#0072B2"),
    "broken": ("!", "#CC79A7"),
    "blocked": ("⏸", "#E69F00"),
}
OTHER = ("–", "#666666")


@dataclass(frozen=True)
class CheckTable:
    """The result of one check; a notebook shows it as HTML, a terminal as text."""

    chapter: str
    title: str
    owner: str  # "mine", or "reference" when that was asked for
    points: int = 0
    offered: int = 0
    tasks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    problem: str = ""  # why there is no result

    @property
    def passed(self) -> bool:
        """All points of the chapter."""
        return bool(self.tasks) and self.points == self.offered

    def __str__(self) -> str:
        if self.problem:
            return f"{self.chapter}: {self.problem}"
        lines = [f"{self.chapter} {self.title}: {self.points}/{self.offered}"]
        for task in self.tasks:
            sign, _ = SIGNS.get(task["state"], OTHER)
            score = f"{task['earned']}/{task['points']}"
            lines.append(
                f"{sign} {task['id']} {task['name']} ({self.owner}): {task['label']} {score}"
            )
            lines += [f"    {line}" for line in _note(task).splitlines()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if self.problem:
            return f"<p><b>{self.chapter}</b>: {html.escape(self.problem)}</p>"
        rows = "".join(_row(task, self.owner) for task in self.tasks)
        cells = "".join(
            f'<th style="text-align:left">{name}</th>'
            for name in ("", "task", "unit", "whose", "result", "points")
        )
        marks = ", ".join(f"{html.escape(p)} ({d})" for p, d in self.files.items())
        source = f"mine: {marks}; earlier units: reference" if marks else "all units: reference"
        return (
            f"<div><b>{self.chapter} {html.escape(self.title)}: {self.points} of {self.offered} "
            f'points</b><table style="margin:0.4em 0"><tr>{cells}</tr>{rows}</table>'
            f'<small style="color:#666">{source}</small></div>'
        )


def check(chapter: str, impl: str = "exercises", seconds: float = 120) -> CheckTable:
    """Run the visible tests of `chapter` on your file and show what came of each task."""
    course = load_course()
    found = course.chapter(chapter)
    return to_table(course, found.id, impl, run_tests(course, [found.id], impl, seconds=seconds))


def to_table(course: Course, chapter: str, impl: str, run: ChildRun) -> CheckTable:
    """A run's result as a table."""
    title = course.chapter(chapter).title
    owner = "reference" if impl == "reference" else "mine"
    if not run.progress:
        last = "\n".join(run.output.strip().splitlines()[-3:])
        return CheckTable(chapter, title, owner, problem=last or "the tests gave no result")
    prefix = f"{course.root}{os.sep}"
    files = {path.removeprefix(prefix): mark for path, mark in run.progress["files"].items()}
    return CheckTable(
        chapter,
        title,
        owner,
        points=run.progress["points"],
        offered=run.progress["offered"],
        tasks=run.progress["tasks"],
        files=files,
    )


def _note(task: dict[str, Any]) -> str:
    """What to do or read next for a task."""
    if task["state"] == "todo":
        line = next((test["line"] for test in task["tests"] if test["line"]), None)
        where = f" at line {line}" if line else ""
        return f"Not written yet: replace the `raise NotImplementedError`{where} and save the file."
    return str(task["text"])


def _row(task: dict[str, Any], owner: str) -> str:
    sign, color = SIGNS.get(task["state"], OTHER)
    result = f'<span style="color:{color};font-weight:bold">{html.escape(task["label"])}</span>'
    cells = [
        f'<span style="color:{color};font-weight:bold">{sign}</span>',
        task["id"],
        f"<code>{html.escape(task['name'])}</code>",
        owner,
        result,
        f"{task['earned']}/{task['points']}",
    ]
    row = "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells)
    note = _note(task)
    if not note:
        return f"<tr>{row}</tr>"
    # Failure texts are columns of plain text, so they keep their spaces.
    block = f'<pre style="margin:0;white-space:pre-wrap">{html.escape(note)}</pre>'
    return f'<tr>{row}</tr><tr><td></td><td colspan="5" style="text-align:left">{block}</td></tr>'
