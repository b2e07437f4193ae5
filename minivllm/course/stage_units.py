"""`use="mine"`: the units of the exercises folder that are solved, for programs to run with.

Owns the choice. A unit counts as solved when all tasks of its object pass their visible tests;
whatever is not is the reference's, so that a program always runs.
"""

from __future__ import annotations

from typing import Any

from minivllm.course.binding import units
from minivllm.course.runner import run_tests
from minivllm.course.stubs import is_edited
from minivllm.course.table import Course, load_course


def solved_units(course: Course | None = None, seconds: float = 120) -> dict[str, Any]:
    """Solved objects by their own name, and by the name of their seat in the engine.

    The tests run in a child process first; nothing is run for untouched stubs.
    """
    course = course or load_course()
    edited = [chapter.id for chapter in course.chapters if is_edited(course, chapter)]
    if not edited:
        return {}
    run = run_tests(course, edited, seconds=seconds)
    passed = {task["id"] for task in run.progress.get("tasks", []) if task["state"] == "pass"}
    solved = [
        (chapter, name)
        for chapter in course.chapters
        for name in chapter.names
        if all(task.id in passed for task in chapter.tasks if task.name == name)
    ]
    if not solved:
        return {}
    chapters = list(dict.fromkeys(chapter.id for chapter, _ in solved))
    # A class that two chapters write is built on the earlier answer only if that one is solved.
    bound = units("exercises", chapters, course, chain=frozenset(chapters))
    found: dict[str, Any] = {}
    for chapter, name in solved:
        tasks = [task for task in chapter.tasks if task.name == name]
        found[name] = bound.of(tasks[0]).value
        found |= bound.seated(tasks)
    return found
