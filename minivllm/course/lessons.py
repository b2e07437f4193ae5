"""Executes the lessons and opens a student's copies of them.

Owns `make lessons` (run each notebook from a clean kernel, keep its outputs, drop what differs from
run to run) and `minivllm course lab`. Students run copies in `work/`, so that the committed
notebooks stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minivllm.course.root import work_folder
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


def copy_lessons(course: Course) -> list[str]:
    """Copy notebooks that are not yet in work/; a student's own copies are never touched."""
    target = work_folder(course.root)
    target.mkdir(parents=True, exist_ok=True)
    messages = []
    for path in lesson_paths(course):
        copy = target / path.name
        if copy.exists():
            messages.append(f"kept your work/{path.name}")
        else:
            shutil.copyfile(path, copy)
            messages.append(f"copied work/{path.name}")
    return messages


def open_lab(course: Course, launch: bool = True) -> int:
    """Copy the lessons and open JupyterLab on them."""
    print("\n".join(copy_lessons(course)))
    if not launch:
        return 0
    command = [sys.executable, "-m", "jupyterlab"]
    return subprocess.call(command, cwd=work_folder(course.root), env=child_environment())
