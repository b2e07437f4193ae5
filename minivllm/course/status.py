"""`minivllm course status`: a bar a chapter, the next task, what solved chapters unlock.

Owns the text. Chapters whose file is an untouched stub are not run: they are at zero by definition.
"""

from __future__ import annotations

from typing import Any

from minivllm.course.results import PASS, UNAVAILABLE
from minivllm.course.runner import ChildRun, run_tests
from minivllm.course.stubs import is_edited
from minivllm.course.table import Chapter, Course, Task


def status_lines(course: Course) -> list[str]:
    """Run what has been edited and draw the bars."""
    edited = [chapter.id for chapter in course.chapters if is_edited(course, chapter)]
    tasks: dict[str, dict[str, Any]] = {}
    lines = []
    if edited:
        run = run_tests(course, edited)
        tasks = {task["id"]: task for task in run.progress.get("tasks", [])}
        if not tasks:
            lines.append(f"the tests gave no result: {run.output.strip().splitlines()[-1:]}")
    following = ""
    earned = offered = 0
    for chapter in course.chapters:
        lines.append(_bar(chapter, tasks))
        for task in chapter.tasks:
            result = tasks.get(task.id)
            points = result["earned"] if result else 0
            possible = result and result["state"] == "unavailable"
            earned, offered = earned + points, offered + (0 if possible else task.points)
            if not following and not possible and points < task.points:
                label = result["label"] if result else "todo"
                following = f"next: {task.id} {', '.join(task.units)} ({label})"
    return [*lines, f"{earned}/{offered} points; {following or 'all done'}"]


def next_open(course: Course) -> Task | None:
    """The first task that does not pass yet; runs the tests of what has been edited, if any."""
    edited = [chapter.id for chapter in course.chapters if is_edited(course, chapter)]
    run = run_tests(course, edited) if edited else ChildRun()
    settled = {
        task["id"] for task in run.progress.get("tasks", []) if task["state"] in (PASS, UNAVAILABLE)
    }
    return next((task for task in course.tasks if task.id not in settled), None)


def _bar(chapter: Chapter, tasks: dict[str, dict[str, Any]], width: int = 20) -> str:
    points = sum(task.points for task in chapter.tasks)
    earned = sum(tasks[task.id]["earned"] for task in chapter.tasks if task.id in tasks)
    filled = round(width * earned / points) if points else 0
    bar = "#" * filled + "." * (width - filled)
    # A full bar says what it was for; an open one what it would give.
    note = f"unlocked: {chapter.unlocks}" if earned == points else f"unlocks {chapter.unlocks}"
    return f"{chapter.id}  [{bar}] {earned:>2}/{points:<2}  {chapter.title}; {note}"
