"""What an exercise may import besides torch and the standard library.

Owns the list of plumbing that chapters hand to students, and earlier chapters' units by their own
names. Nothing here is imported before it is asked for. Under grading, `binding.py` puts a narrower
module in this one's place: it lacks the chapter's own answers and, with --chain, holds the
student's earlier units.
"""

from __future__ import annotations

from importlib import import_module

# Name -> module. A chapter's author adds what a stub needs and no student is asked to write.
PLUMBING: dict[str, str] = {
    "ModelConfig": "minivllm.config",
    "Sequence": "minivllm.engine.sequence",
    "Status": "minivllm.engine.sequence",
}


def __getattr__(name: str) -> object:
    if name in PLUMBING:
        return getattr(import_module(PLUMBING[name]), name)
    if not name.startswith("__"):
        from minivllm.course.table import load_course

        for task in load_course().tasks:
            if task.name == name:
                return getattr(import_module(task.source), name)
    raise AttributeError(f"minivllm.course.given has no {name!r}")
