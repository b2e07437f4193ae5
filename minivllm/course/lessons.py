"""Executes the lessons in place.

Owns `make lessons`: run each notebook from a clean kernel, keep its outputs, drop what differs from
run to run. Students run copies in `work/` (see lab.py), so that the committed notebooks stay as
they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minivllm.course.runner import child_environment
from minivllm.course.table import Course

SECONDS_PER_CELL = 120


def lesson_paths(course: Course, names: Sequence[str] = ()) -> list[Path]:
    """The notebooks that exist, or those of the named chapters."""
    folder = course.root / "lessons"
    if names:
        return [_lesson(course, folder, name) for name in names]
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def _lesson(course: Course, folder: Path, name: str) -> Path:
    """A chapter's notebook, or one without tasks: the tour is in no table."""
    untabled = sorted(folder.glob(f"{name.removeprefix('ch').zfill(2)}_*.ipynb"))
    return untabled[0] if untabled else folder / course.chapter(name).lesson


def execute(path: Path, course: Course) -> Any:
    """Run a notebook in a clean kernel and return it. Raises on the first cell that fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    # One thread and the CPU: outputs are to be the same wherever `make lessons` runs.
    environment = {**child_environment(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        client = NotebookClient(
            notebook,
            timeout=SECONDS_PER_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        )
        client.execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    clean(notebook)
    notebook.metadata["minivllm"] = {
        "made_by": "make lessons",
        "course": course.version,
        "torch": version("torch"),
        "device": "cpu",
    }
    return notebook


def clean(notebook: Any) -> Any:
    """Drop times, widget state and kernel details: noise in every later diff."""
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
    return notebook


def execute_lessons(course: Course, names: Sequence[str]) -> int:
    """Execute in place; 1 if a notebook failed (it is then left as it was)."""
    import nbformat
    from nbclient.exceptions import CellExecutionError

    failed = 0
    for path in lesson_paths(course, names):
        try:
            notebook = execute(path, course)
        except CellExecutionError as error:
            failed = 1
            print(f"{path.name}: {error}")
            continue
        nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells, {path.stat().st_size // 1024} KiB")
    return failed
