"""Runs the exercise tests in a child process and reads the result back.

Owns the child's command line, environment and time limit, for `status`, notebooks and the grader's
own tests. A student's endless loop or crash ends the child, never the notebook.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.course.table import Course


@dataclass(frozen=True)
class ChildRun:
    """What came of one pytest run."""

    progress: dict[str, Any] = field(default_factory=dict)  # empty if the run gave no result
    output: str = ""
    returncode: int | None = None  # None: stopped at the time limit
    grades: dict[str, Any] = field(default_factory=dict)


def run_tests(
    course: Course,
    chapters: Sequence[str],
    impl: str = "exercises",
    options: Sequence[str] = (),
    seconds: float = 120,
) -> ChildRun:
    """`pytest exercises/test_...` of the chapters in a fresh interpreter."""
    from minivllm.course.binding import is_named

    files = [str(course.root / "exercises" / course.chapter(c).test_file) for c in chapters]
    if not is_named(impl):
        impl = str(Path(impl).resolve())  # the child works in another folder
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--import-mode=importlib"]
        # Named here as well: a course folder beside a shared install has no pyproject.toml.
        command += ["-p", "minivllm.course.pytest_plugin", "--rootdir", str(course.root)]
        command += [*files, "--impl", impl, "--grade-json", str(target), *options]
        try:
            done = subprocess.run(
                command,
                cwd=course.root,
                env=child_environment(),
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return ChildRun(output=f"stopped after {seconds:.0f} s: is there an endless loop?")
        progress = _read_json(target.with_name("progress.json"))
        output = done.stdout + done.stderr
        return ChildRun(progress, output, done.returncode, _read_json(target))


def child_environment() -> dict[str, str]:
    """The caller's environment, with this package importable and one thread."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONIOENCODING": "utf-8",
    }


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
