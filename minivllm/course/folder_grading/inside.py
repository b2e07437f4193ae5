"""The child's side of grading one chapter: limits on, surroundings off, tests, one message.

Owns what happens between fork and exit. It never returns into the parent's code.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from minivllm.course.folder_grading.children import Job, Limits


def run_inside(
    job: Job, limits: Limits, folder: Path, key: str, result_fd: int, output_fd: int
) -> NoReturn:
    """Grade `job` and send the result; always ends the process."""
    code = 1
    try:
        os.setsid()
        _redirect(output_fd)
        _close_others(keep={0, 1, 2, result_fd})
        _clean_surroundings(folder)
        _limit(limits)
        tasks = job.work(job)
        _send(result_fd, {"key": key, "tasks": tasks})
        code = 0
    except BaseException as error:
        os.write(2, f"\n{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        # No exit handlers: a submission may have left some.
        os._exit(code)


def _redirect(output_fd: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd in (1, 2):
        os.dup2(output_fd, fd)
    # Python's own objects may be replaced (a notebook, pytest's capture): back to the pipe.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    sys.stderr = sys.stdout


def _close_others(keep: set[int]) -> None:
    """Other children's pipes and whatever the parent had open."""
    keep = keep | {sys.stdout.fileno()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            # One of them has been closed already: the descriptor that listed the folder.
            with contextlib.suppress(OSError):
                os.close(int(name))


def _clean_surroundings(folder: Path) -> None:
    """A private folder, and no variable that the instructor's shell happens to hold."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(
        PATH="/usr/bin:/bin",
        HOME=str(folder),
        TMPDIR=str(folder),
        LANG="C.UTF-8",
        OMP_NUM_THREADS="1",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    tempfile.tempdir = str(folder)  # Python had remembered the instructor's
    # Grading leaves no trace in exercises/.
    sys.dont_write_bytecode = True


def _limit(limits: Limits) -> None:
    # A CUDA build of torch maps gigabytes at import: the allowance is for what comes on top.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = max(limits.memory, pages * resource.getpagesize() + limits.memory * 3 // 4)
    seconds = int(limits.seconds) + 5
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits.file_size),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def grade_answer(job: Job) -> list[dict[str, Any]]:
    """The visible and hidden tests on the job's file: a dictionary a task."""
    from minivllm.course.kill_table import grade_here

    options = [f"--task={task}" for task in job.tasks]
    if job.hidden:
        options += ["--hidden", str(job.hidden)]
    grading, output = grade_here(job.course, job.chapter, str(job.file), options)
    print(output)
    sys.stdout.flush()
    return [result.as_dict() for result in grading.results()]


def _send(fd: int, message: dict[str, Any]) -> None:
    data = json.dumps(message, default=str).encode()
    while data:
        data = data[os.write(fd, data) :]
