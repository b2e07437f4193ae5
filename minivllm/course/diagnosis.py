"""Says which typical mistake a wrong answer is.

Owns the trail of what a task's tests asked and what came back, and its comparison with the list of
mistakes: a mistake is named when it would have given the same answer every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.course.compare import error_ratio, snapshot
from minivllm.course.mistakes import Mistake, load_mistakes
from minivllm.course.table import Task

# For wrong answers in a dtype that the task never asked for.
FALLBACK = {"float64": 1e-9, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

Probe = Callable[[Any], Any]


@dataclass(frozen=True)
class Outcome:
    """What a probe gave: a value, or the error it ended with."""

    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Step:
    """One question to a unit and its answer."""

    probe: Probe
    outcome: Outcome
    wrong: bool
    ratio: float  # error over allowed error; infinity for a wrong kind


@dataclass
class Trail:
    """All questions of one task so far, in order."""

    task: Task
    steps: list[Step] = field(default_factory=list)
    # Mistakes that agree with the first `compared` steps; None before anything was wrong.
    fitting: list[Mistake] | None = None
    compared: int = 0


def observe(probe: Probe, unit: Any) -> Outcome:
    """Run a probe. Whatever a student's code raises is an answer too."""
    try:
        return Outcome(value=snapshot(probe(unit)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome(error=error)


def same_outcome(one: Outcome, other: Outcome, tolerance: Mapping[str, float]) -> bool:
    """Equal within the task's tolerance, or the same kind of error."""
    if one.error is not None or other.error is not None:
        return type(one.error) is type(other.error)
    if type(one.value) is type(other.value) and _holds_no_tensor(one.value):
        return bool(one.value == other.value)
    return error_ratio(one.value, other.value, {**FALLBACK, **tolerance}) <= 1


def diagnose(trail: Trail) -> list[Mistake]:
    """The mistakes that agree with every answer of the trail, in the order of their file.

    Empty when nothing was wrong or nothing fits: a guess would mislead.
    """
    if trail.fitting is None:
        if not any(step.wrong for step in trail.steps):
            return []
        known = load_mistakes(trail.task.chapter)
        trail.fitting = [mistake for mistake in known if mistake.task == trail.task.id]
    # What has once disagreed never fits again, so only new steps are asked. Wrong answers tell
    # mistakes apart soonest and come first.
    new = sorted(trail.steps[trail.compared :], key=lambda step: not step.wrong)
    trail.compared = len(trail.steps)
    trail.fitting = [
        mistake
        for mistake in trail.fitting
        if all(
            same_outcome(observe(step.probe, mistake.unit), step.outcome, trail.task.tolerance)
            for step in new
        )
    ]
    return trail.fitting


def diagnosis_text(trail: Trail) -> str:
    """One sentence, or nothing."""
    found = diagnose(trail)[:2]
    return " Or: ".join(f'this is what "{m.name}" gives: {m.message}' for m in found)


def _holds_no_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_holds_no_tensor(item) for item in value)
    if isinstance(value, dict):
        return all(_holds_no_tensor(item) for item in value.values())
    return value is None or isinstance(value, (int, float, str, bool))
