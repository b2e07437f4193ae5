"""The table of chapters in README.md, written from course.toml.

Owns the lines between two markers of the README and nothing else of it. Chapters appear when they
are in the table `exercises/course.toml`, a lesson without tasks (the tour) when it exists and says
its goal and minutes in its first cell: the README never promises what is not there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from minivllm.course.lessons import lesson_paths
from minivllm.course.stubs import read_text, write_text
from minivllm.course.table import Chapter, Course

BEGIN, END = "<!-- chapters -->", "<!-- end of chapters -->"


def table_lines(course: Course) -> list[str]:
    """The table in Markdown: chapter, goal, minutes, points, and their sums."""
    lines = ["| | Chapter | Goal | Minutes | Points |", "|---|---|---|--:|--:|"]
    minutes = points = 0
    named = {chapter.lesson for chapter in course.chapters}
    for path in [path for path in lesson_paths(course) if path.name not in named]:
        title, goal, time = _head(path)
        minutes += time
        lines.append(f"| {path.name[:2]} | [{title}](lessons/{path.name}) | {goal} | {time} | - |")
    for chapter in course.chapters:
        worth = sum(task.points for task in chapter.tasks)
        extra = sum(task.points for task in chapter.tasks if task.bonus)
        minutes, points = minutes + chapter.minutes, points + worth - extra
        shown = f"{worth}" if not extra else f"{worth - extra} + {extra}"
        cells = [chapter.id[2:], _title(course, chapter), chapter.goal, str(chapter.minutes), shown]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, f"| | together | | {minutes} | {points} |"]


def update_readme(course: Course) -> list[str]:
    """Rewrite the table in README.md. ValueError if its two markers are not there."""
    path = course.root / "README.md"
    text = read_text(path)
    head, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    new = head + begin + "\n".join(table_lines(course)) + "\n" + end + tail
    if new == text:
        return ["README.md is up to date"]
    write_text(path, new)
    return ["wrote the chapters into README.md"]


def _head(path: Path) -> tuple[str, str, int]:
    """Title, goal and minutes from a lesson's first cell. ValueError if they are not there."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join(cells[0]["source"])
    pattern = r"# \d\d (.+)\n.*?\*\*Goal\.\*\* (.+)\n.*?\*\*Time\.\*\* (\d+) minutes"
    found = re.match(pattern, text, re.DOTALL)
    if not found:
        raise ValueError(f"{path.name}: its first cell has no title, **Goal.** and **Time.**")
    title, goal = (part.partition("\n")[0] for part in found.group(1, 2))
    return title, goal, int(found[3])


def _title(course: Course, chapter: Chapter) -> str:
    lesson = course.root / "lessons" / chapter.lesson
    return f"[{chapter.title}](lessons/{chapter.lesson})" if lesson.is_file() else chapter.title
