"""The report of a run: lines for a terminal, Gradescope's JSON, progress.json.

Owns how results look. Never decides them.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.course.grading import FileMark
from minivllm.course.results import PASS, TODO, WRONG, TaskResult, next_task
from minivllm.course.table import Course


def terminal_lines(course: Course, results: Sequence[TaskResult]) -> list[str]:
    """One line a task, the text of what is wrong below it, then points and the next task."""
    width = max((len(r.name) for r in results), default=0)
    label_width = max((len(r.label) for r in results), default=0)
    lines = []
    for result in results:
        score = f"{result.earned}/{result.offered}"
        row = f"{result.id}  {result.name:<{width}}  {result.label:<{label_width}}  {score:>5}"
        lines.append(f"{row}  {one_line(course, result)}".rstrip())
        if result.state == WRONG:
            lines += textwrap.indent(result.text, "    ").splitlines()
    deviating = [t for r in results for t in r.tests if t.category == "engine"]
    if deviating:
        # The first one is where to start: what follows it may be fed by it.
        lines.append(f"in the engine {deviating[0].task} is the first to deviate:")
        lines += textwrap.indent(deviating[0].text, "    ").splitlines()
    return [*lines, total_line(results)]


def one_line(course: Course, result: TaskResult) -> str:
    """What a task's line says after its label."""
    if result.state == PASS:
        return "1 test" if len(result.tests) == 1 else f"{len(result.tests)} tests"
    if result.state == WRONG:
        wrong = [test for test in result.tests if test.state == WRONG]
        fail = f"{len(wrong)} of {len(result.tests)} tests fail"
        return f"{fail}, first: {wrong[0].test}" if len(result.tests) > 1 else wrong[0].test
    if result.state == TODO:
        line = next((test.line for test in result.tests if test.line), 0)
        file = course.chapter(result.id).file
        return f"{file}:{line}" if line else file
    return result.text.partition("\n")[0]


def total_line(results: Sequence[TaskResult]) -> str:
    """`3/5, next: ch02.2`."""
    earned, offered = sum(r.earned for r in results), sum(r.offered for r in results)
    following = next_task(results)
    if following is None:
        return f"{earned}/{offered}, all done"
    first = following.blocked_by or following.id  # what it waits for comes before it
    return f"{earned}/{offered}, next: {first} (minivllm course hint {first})"


def gradescope(results: Sequence[TaskResult]) -> dict[str, Any]:
    """The results.json that Gradescope's autograder reads, one entry a task."""
    return {
        "score": sum(r.earned for r in results),
        "max_score": sum(r.offered for r in results),
        "output": total_line(results),
        "visibility": "visible",
        "tests": [
            {
                "name": f"{r.id} {r.name}",
                "score": r.earned,
                "max_score": r.offered,
                "status": "passed" if r.state == PASS else "failed",
                "output": r.label if not r.text else f"{r.label}\n{r.text}",
                "visibility": "visible",
            }
            for r in results
        ],
    }


def progress(
    course: Course, impl: str, seed: int, files: Sequence[FileMark], results: Sequence[TaskResult]
) -> dict[str, Any]:
    """All that is known of a run, for `course status`, notebooks and `course grade`."""
    following = next_task(results)
    return {
        "course": course.title,
        "version": course.version,
        "seed": seed,
        "impl": impl,
        "files": {str(mark.path): mark.digest for mark in files},
        "points": sum(r.earned for r in results),
        "offered": sum(r.offered for r in results),
        "next": following.id if following else None,
        "tasks": [r.as_dict() for r in results],
    }


def write_json(path: Path, grades: dict[str, Any], record: dict[str, Any]) -> None:
    """Write the Gradescope form to `path` and progress.json beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(grades, indent=2) + "\n", encoding="utf-8")
    beside = path.with_name("progress.json")
    beside.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
