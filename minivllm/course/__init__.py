"""The course: stubs, binding, grading, hints and notebooks around the engine's own code.

`check("ch02")` is what the notebooks call; everything else is reached by `minivllm course ...`.
Never imported by the engine, and importing it loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.course.notebook import check as check

__all__ = ["check"]


def __getattr__(name: str) -> object:
    if name == "check":
        from minivllm.course.notebook import check

        return check
    raise AttributeError(f"module 'minivllm.course' has no attribute {name!r}")
