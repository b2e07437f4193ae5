"""What an instructor gets: a table on the terminal, JSON, CSV, one feedback file a student.

Owns the form of these. Every report carries the seed and the course's version, so that a grade can
be made again.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from minivllm.course.folder_grading.children import JobResult
from minivllm.course.folder_grading.jobs import lost_task
from minivllm.course.folder_grading.submissions import Submission
from minivllm.course.table import Chapter, Course


@dataclass(frozen=True)
class StudentGrade:
    """One student's results over all chapters asked for."""

    student: str
    tasks: tuple[dict[str, Any], ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    seconds: float

    @classmethod
    def collect(
        cls,
        course: Course,
        chapters: Sequence[Chapter],
        submission: Submission,
        results: Mapping[str, JobResult],
    ) -> StudentGrade:
        """Put the chapters together; a file that was not sent is a zero with that reason."""
        tasks: list[dict[str, Any]] = []
        for chapter in chapters:
            result = results.get(chapter.id)
            why = result.problem if result else f"{chapter.file} was not sent"
            lost = [lost_task(t.id, t.units, t.points, why) for t in chapter.tasks]
            if result is None:
                lost = [{**task, "state": "broken", "label": "missing file"} for task in lost]
            tasks += list(result.tasks) if result and result.tasks else lost
        return cls(
            submission.student,
            tuple(tasks),
            tuple(submission.missing),
            tuple(submission.extra),
            sum(result.seconds for result in results.values()),
        )

    @property
    def points(self) -> int:
        return sum(task["earned"] for task in self.tasks)

    @property
    def offered(self) -> int:
        return sum(task["points"] for task in self.tasks if task["state"] != "unavailable")


def write_reports(course: Course, grades: Sequence[StudentGrade], args: argparse.Namespace) -> None:
    """The table, and the files that were asked for."""
    print("\n".join(summary_lines(course, grades)))
    if args.json:
        _write(args.json, json.dumps(as_json(course, grades), indent=2) + "\n")
    if args.csv:
        write_csv(args.csv, grades)
    if args.feedback:
        for path, grade in _feedback_paths(args.feedback, grades):
            _write(path, feedback(course, grade))
    if args.gradescope:
        _write(args.gradescope, json.dumps(gradescope(course, grades[0]), indent=2) + "\n")


def summary_lines(course: Course, grades: Sequence[StudentGrade]) -> list[str]:
    """One line a student."""
    width = max(len(grade.student) for grade in grades)
    lines = [f"course {course.version}, seed {course.seed}, {len(grades)} submissions"]
    for grade in grades:
        notes = [f"{label}: {', '.join(names)}" for label, names in _by_label(grade).items()]
        notes += [f"not used: {', '.join(grade.extra)}"] if grade.extra else []
        score = f"{grade.points}/{grade.offered}"
        lines.append(f"{grade.student:<{width}}  {score:>7}  {'; '.join(notes)}".rstrip())
    return lines


def _by_label(grade: StudentGrade) -> dict[str, list[str]]:
    """What did not pass: label -> the tasks or chapters that have it."""
    names: dict[str, list[str]] = {}
    for task in _merged(grade.tasks):
        if task["state"] != "pass":
            names.setdefault(task["label"], []).append(task["id"])
    return names


def _merged(tasks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The tasks, but one entry for a chapter whose tasks are all told the same words."""
    for chapter, group in groupby(tasks, lambda task: task["id"].partition(".")[0]):
        own = list(group)
        said = {(task["label"], task["text"]) for task in own}
        if len(own) > 1 and len(said) == 1 and own[0]["text"]:
            sums = {key: sum(task[key] for task in own) for key in ("earned", "points")}
            yield {**own[0], "id": chapter, "name": "all tasks", **sums}
        else:
            yield from own


def as_json(course: Course, grades: Sequence[StudentGrade]) -> dict[str, Any]:
    """Everything."""
    return {
        "course": course.title,
        "version": course.version,
        "seed": course.seed,
        "students": [
            {
                "student": grade.student,
                "points": grade.points,
                "offered": grade.offered,
                "missing": grade.missing,
                "extra": grade.extra,
                "seconds": round(grade.seconds, 2),
                "tasks": grade.tasks,
            }
            for grade in grades
        ],
    }


def gradescope(course: Course, grade: StudentGrade) -> dict[str, Any]:
    """The results.json of one student."""
    return {
        "score": grade.points,
        "max_score": grade.offered,
        "execution_time": round(grade.seconds, 2),
        "output": f"course {course.version}, seed {course.seed}",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": f"{task['id']} {task['name']}",
                "score": task["earned"],
                "max_score": 0 if task["state"] == "unavailable" else task["points"],
                "status": "passed" if task["state"] == "pass" else "failed",
                "output": "\n".join(part for part in (task["label"], task["text"]) if part),
                "visibility": "visible",
            }
            for task in grade.tasks
        ],
    }


def write_csv(path: Path, grades: Sequence[StudentGrade]) -> None:
    """One row a student, one column a task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = [task["id"] for task in grades[0].tasks]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["student", "points", "offered", *ids, "missing", "not used"])
        for grade in grades:
            by_id = {task["id"]: task["earned"] for task in grade.tasks}
            row = [_plain(grade.student), grade.points, grade.offered, *(by_id[i] for i in ids)]
            writer.writerow([*row, " ".join(grade.missing), " ".join(map(_plain, grade.extra))])


def feedback(course: Course, grade: StudentGrade) -> str:
    """What one student reads."""
    lines = [f"{grade.student}: {grade.points} of {grade.offered} points", ""]
    for task in _merged(grade.tasks):
        score = f"{task['earned']}/{task['points']}"
        lines.append(f"{task['id']}  {task['name']}: {task['label']}, {score}")
        lines += textwrap.indent(task["text"], "    ").splitlines()
    lines += [""]
    lines += [f"sent, not used: {name}" for name in grade.extra]
    return "\n".join([*lines, f"course {course.version}, seed {course.seed}"]) + "\n"


def _feedback_paths(
    folder: Path, grades: Sequence[StudentGrade]
) -> list[tuple[Path, StudentGrade]]:
    """A safe file name for each student, numbered where two would be equal."""
    taken: dict[str, int] = {}
    pairs = []
    for grade in grades:
        name = re.sub(r"[^\w.-]+", "_", grade.student).strip("._") or "student"
        taken[name] = taken.get(name, 0) + 1
        number = f"-{taken[name]}" if taken[name] > 1 else ""
        pairs.append((folder / f"{name}{number}.txt", grade))
    return pairs


def _plain(text: str) -> str:
    """A spreadsheet runs cells that begin like a formula: those get an apostrophe."""
    return f"'{text}" if text[:1] in "=+-@\t" else text


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
