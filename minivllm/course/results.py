"""Result states, and the step from many tests to one result a task.

Owns the words for what can come of a task and the all-or-nothing rule. Knows nothing of pytest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minivllm.course.table import Task

PASS, WRONG, TODO, BROKEN, BLOCKED = "pass", "wrong", "todo", "broken", "blocked"
UNAVAILABLE = "unavailable"  # needs a device that is not here: neither earned nor lost
MISSING = "missing"  # no test ran: a fault of the course, never of the student
WORDS = {BROKEN: "broken file", UNAVAILABLE: "not gradable here", MISSING: "no test ran"}
# The state of a task is the first of these that any of its tests has.
ORDER = (BROKEN, MISSING, BLOCKED, TODO, WRONG, PASS, UNAVAILABLE)


class Failed(Exception):
    """A check that did not hold; `text` is what the student reads."""

    def __init__(self, state: str, category: str, text: str) -> None:
        super().__init__(text)
        self.state = state
        self.category = category
        self.text = text


@dataclass(frozen=True)
class TestResult:
    """What came of one test."""

    task: str
    test: str  # the function's name
    state: str
    category: str = ""  # "values", "shape", "raised", ...; all that a hidden test tells
    text: str = ""
    hidden: bool = False
    line: int = 0  # of the exercise file, for a todo

    __test__ = False  # not a pytest class


@dataclass(frozen=True)
class TaskResult:
    """What came of one task."""

    id: str
    name: str
    state: str
    points: int
    earned: int
    text: str = ""
    blocked_by: str = ""
    tests: tuple[TestResult, ...] = field(default=())

    @property
    def label(self) -> str:
        """The word shown to the student."""
        if self.state == BLOCKED and self.blocked_by:
            return f"blocked by {self.blocked_by}"
        return WORDS.get(self.state, self.state)

    @property
    def offered(self) -> int:
        """Points that could have been earned here."""
        return 0 if self.state == UNAVAILABLE else self.points

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "label": self.label}


def summarize(tasks: Sequence[Task], tests: Iterable[TestResult]) -> list[TaskResult]:
    """One result a task: all its tests must pass. A task without a test that ran is MISSING."""
    by_task: dict[str, list[TestResult]] = {task.id: [] for task in tasks}
    for test in tests:
        by_task[test.task].append(test)
    return [_task_result(task, by_task[task.id]) for task in tasks]


def _task_result(task: Task, tests: list[TestResult]) -> TaskResult:
    states = {test.state for test in tests} or {MISSING}
    state = next(state for state in ORDER if state in states)
    # Passing here and not runnable there is no full pass: part of the answer was never seen.
    if state == PASS and UNAVAILABLE in states:
        state = UNAVAILABLE
    # A visible failure says more than a hidden one.
    relevant = sorted((t for t in tests if t.state == state), key=lambda t: t.hidden)
    first = relevant[0] if relevant else None
    return TaskResult(
        id=task.id,
        name=", ".join(task.units),
        state=state,
        points=task.points,
        earned=task.points if state == PASS else 0,
        text=first.text if first and state != PASS else "",
        blocked_by=first.category if first and state == BLOCKED else "",
        tests=tuple(tests),
    )


def next_task(results: Sequence[TaskResult]) -> TaskResult | None:
    """The first task that is still to be won."""
    return next((r for r in results if r.state not in (PASS, UNAVAILABLE)), None)
