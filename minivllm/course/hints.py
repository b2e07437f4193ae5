"""`exercises/hints.toml`: three levels a task, shown one at a time.

Owns the reading of the hints and the memory of which level a student has seen. Never gives an
answer: the third level is near-code with its hard part left out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from minivllm.course.root import work_folder
from minivllm.course.table import Course

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEVELS = ("idea", "shapes", "code")


@dataclass(frozen=True)
class Hint:
    """One level of one task's hints."""

    task: str
    level: int  # 1 to 3
    text: str


def load_hints(course: Course) -> dict[str, tuple[str, ...]]:
    """The three texts of each task; ValueError names a task that lacks one or does not exist."""
    with open(course.root / "exercises" / "hints.toml", "rb") as file:
        table = tomllib.load(file)
    known = {task.id for task in course.tasks}
    if table.keys() != known:
        odd = sorted(table.keys() ^ known)
        raise ValueError(f"hints.toml and course.toml do not name the same tasks: {odd}")
    for task, entry in table.items():
        if tuple(entry) != LEVELS:
            raise ValueError(f"hints.toml: [{task}] has {list(entry)}, not {list(LEVELS)}")
    return {task: tuple(entry[level].strip() for level in LEVELS) for task, entry in table.items()}


def next_hint(course: Course, task_id: str, level: int | None = None) -> Hint:
    """The level after the last one shown (or the `level` asked for), and remember it."""
    texts = load_hints(course)[course.task(task_id).id]
    memory = work_folder(course.root) / "hints.json"
    seen: dict[str, int] = {}
    if memory.is_file():
        seen = json.loads(memory.read_text(encoding="utf-8"))
    chosen = min(level or seen.get(task_id, 0) + 1, len(texts))
    seen[task_id] = chosen
    try:
        memory.parent.mkdir(exist_ok=True)
        memory.write_text(json.dumps(seen), encoding="utf-8")
    except OSError:
        # A read-only course folder: without memory, `--level` still reaches every hint.
        pass
    return Hint(task_id, chosen, texts[chosen - 1])
