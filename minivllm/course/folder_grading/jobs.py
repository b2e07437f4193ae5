"""All chapter files of all submissions: each is graded once, and once more if that gave nothing.

Owns what becomes of a child that gave no result. How a child runs is in children.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minivllm.course.folder_grading.children import Job, JobResult, Limits, run_all


def run_jobs(
    jobs: Sequence[Job],
    limits: Limits,
    scratch: Path,
    at_once: int,
    on_end: Callable[[Job], None] = lambda job: None,
) -> dict[Path, JobResult]:
    """Run all jobs, `at_once` at a time; results by the file that was graded.

    A chapter that gave no result is run again task by task, so that one endless loop costs its own
    task's points only. `on_end` is called with each job whose result is final.
    """
    done: dict[Path, JobResult] = {}

    def keep(job: Job, result: JobResult) -> None:
        done[job.file] = result
        if not _runs_again(job, result):
            on_end(job)

    run_all(jobs, limits, scratch / "first", at_once, keep)
    for job in jobs:
        if not _runs_again(job, done[job.file]):
            continue
        singles = [
            Job(job.course, job.file, job.chapter, job.hidden, (task.id,))
            for task in job.chapter.tasks
        ]
        place = scratch / "again" / job.file.parent.name / job.chapter.id
        parts = run_all(singles, limits, place, at_once)
        done[job.file] = _joined(singles, parts)
        on_end(job)
    return done


def _runs_again(job: Job, result: JobResult) -> bool:
    return not result.tasks and len(job.chapter.tasks) > 1


def _joined(singles: Sequence[Job], parts: Sequence[JobResult]) -> JobResult:
    """One result of a chapter whose tasks ran apart."""
    tasks: list[dict[str, Any]] = []
    for job, part in zip(singles, parts):
        task = job.course.task(job.tasks[0])
        tasks += part.tasks or [lost_task(task.id, task.units, task.points, part.problem)]
    output = "\n".join(part.output for part in parts if part.output)
    return JobResult(tuple(tasks), "", output, sum(part.seconds for part in parts))


def lost_task(task_id: str, names: Sequence[str], points: int, why: str) -> dict[str, Any]:
    """The zero of a task whose child gave no result."""
    return {
        "id": task_id,
        "name": ", ".join(names),
        "state": "wrong",
        "label": "no result",
        "points": points,
        "earned": 0,
        "text": why,
        "tests": [],
    }
