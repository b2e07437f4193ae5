"""Are the instructor's hidden tests right? The reference must pass them before anybody is graded.

Owns that check and the line that names the test at fault. Students are told nothing of a hidden
test but its name, so a slip in one would cost everybody the task's points without a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minivllm.course.binding import REFERENCE
from minivllm.course.folder_grading.children import Job, Limits, run_all
from minivllm.course.pytest_plugin import is_hidden, task_of
from minivllm.course.results import Failed
from minivllm.course.table import Chapter, Course


def refuse_wrong_tests(
    course: Course,
    chapters: Sequence[Chapter],
    hidden: Path,
    limits: Limits,
    scratch: Path,
    at_once: int,
) -> None:
    """ValueError that names the first test in `hidden` that cannot be right, and says why.

    It runs as a submission does, in children with the same limits: a test that needs more time or
    a file from the instructor's folder fails here as well.
    """
    jobs = [Job(course, Path(REFERENCE), c, hidden, work=_find_faults) for c in chapters]
    faults: list[str] = []
    for job, result in zip(jobs, run_all(jobs, limits, scratch, at_once)):
        faults += [fault["text"] for fault in result.tasks]
        if result.problem:
            last = (result.output.strip() or "no output").splitlines()[-1]
            faults.append(f"with the tests of {job.chapter.id}: {result.problem} ({last})")
    faults = list(dict.fromkeys(faults))  # a file that does not load is found in every chapter
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(f"nobody was graded, a hidden test is at fault: {faults[0]}{more}")


def _find_faults(job: Job) -> list[dict[str, Any]]:
    """In the child: what is wrong with the hidden tests of one chapter."""
    from minivllm.course.kill_table import grade_here  # imports torch: see prepare_parent

    faults = _Faults(job.course)
    options = ["--hidden", str(job.hidden)]
    try:
        grade_here(job.course, job.chapter, str(job.file), options, [faults])
    except RuntimeError:  # nothing ran; where a hidden test is the reason, that is known by now
        if not faults.found:
            raise
    return [{"text": text} for text in faults.found]


class _Faults:
    """A pytest plugin that keeps a line for each hidden test that did not go well."""

    def __init__(self, course: Course) -> None:
        self.tasks = {task.id for task in course.tasks}
        self.found: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests that would count for no task, seen before the course's plugin drops them."""
        hidden = [item for item in items if is_hidden(item)]
        if not hidden and not self.found:
            self.found.append("the folder holds none (files are called test_*.py)")
        for item in hidden:
            if task_of(item) not in self.tasks:
                mark = task_of(item) or "none"
                self.found.append(f"{_name(item)}: its task mark ({mark}) names no task")
                items.remove(item)

    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any], report: Any
    ) -> None:
        """Called for whatever is raised while a file is collected or a test runs."""
        if is_hidden(node) and report.failed and call.excinfo:
            why = _first_line(call.excinfo.value, report.longreprtext)
            what = "fails on the reference" if isinstance(node, pytest.Item) else "does not load"
            self.found.append(f"{_name(node)} {what}: {why}")


def _name(node: pytest.Item | pytest.Collector) -> str:
    """`test_ch02_more.py::test_zero`, whatever the folder."""
    path, mark, rest = node.nodeid.partition("::")
    return f"{Path(path).name}{mark}{rest}"


def _first_line(error: BaseException, shown: str) -> str:
    """The line that tells most: a check's result, an error as pytest shows it, or the error."""
    lines = (error.text if isinstance(error, Failed) else shown).splitlines()
    telling = [line.partition(" ")[2] for line in lines if line.startswith(("result ", "E  "))]
    said = telling[-1:] or f"{type(error).__name__}: {error}".splitlines()
    return said[0].strip()
