"""One child process a submission and chapter, within limits.

Owns fork, limits, the result pipe and the clean-up. The parent has imported torch and pytest but
never student code, and has one thread, so that a fork of it is whole. A result counts only if it
comes through the inherited pipe with this run's key: no result is no points.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.course.folder_grading.inside import grade_answer, run_inside
from minivllm.course.table import Chapter, Course

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Limits:
    """What one child may use."""

    seconds: float = 60
    memory: int = 2 << 30  # bytes of address space, torch's libraries included
    output: int = 64 << 10  # bytes of its output that are kept
    file_size: int = 1 << 20  # bytes of any file it writes


@dataclass(frozen=True)
class Job:
    """One chapter file to grade."""

    course: Course
    file: Path  # or Path("reference")
    chapter: Chapter
    hidden: Path | None = None
    tasks: tuple[str, ...] = ()  # only these; all if empty
    work: Callable[[Job], list[dict[str, Any]]] = grade_answer  # done in the child


@dataclass(frozen=True)
class JobResult:
    """What came of a job: what its work gave (task results), or why there is nothing."""

    tasks: tuple[dict[str, Any], ...] = ()
    problem: str = ""
    output: str = ""
    seconds: float = 0.0


@dataclass
class _Child:
    job: Job
    pid: int
    key: str
    result_fd: int
    output_fd: int
    deadline: float
    started: float
    result: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)


def prepare_parent() -> None:
    """Import what every child needs, once; RuntimeError if this process has several threads."""
    for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR"):
        os.environ[f"{name}_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import torch

    import minivllm.course.kill_table
    import minivllm.course.report  # noqa: F401

    torch.set_num_threads(1)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(
            f"this process has {threads} threads, and a fork copies only one: "
            "run `minivllm course grade` as a command of its own"
        )


def run_all(
    jobs: Sequence[Job],
    limits: Limits,
    scratch: Path,
    at_once: int,
    on_end: Callable[[Job, JobResult], None] = lambda job, result: None,
) -> list[JobResult]:
    """Run each job once, `at_once` at a time; results in the order of the jobs."""
    waiting = list(enumerate(jobs))
    active: dict[int, _Child] = {}
    results: dict[int, JobResult] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or active:
            while waiting and len(active) < at_once:
                index, job = waiting.pop(0)
                active[index] = _start(job, limits, scratch / f"{index:04d}")
                for fd in (active[index].result_fd, active[index].output_fd):
                    selector.register(fd, selectors.EVENT_READ, (active[index], limits))
            _read_ready(selector)
            for index, child in list(active.items()):
                ended, status = os.waitpid(child.pid, os.WNOHANG)
                late = time.monotonic() > child.deadline
                if ended or late:
                    results[index] = _finish(selector, child, None if late else status, limits)
                    del active[index]
                    on_end(child.job, results[index])
    return [results[index] for index in range(len(jobs))]


def _start(job: Job, limits: Limits, folder: Path) -> _Child:
    folder.mkdir(parents=True)
    key = secrets.token_hex(16)
    result_read, result_write = os.pipe()
    output_read, output_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(result_read)
        os.close(output_read)
        run_inside(job, limits, folder, key, result_write, output_write)  # never returns
    os.close(result_write)
    os.close(output_write)
    now = time.monotonic()
    return _Child(job, pid, key, result_read, output_read, now + limits.seconds, now)


def _read_ready(selector: selectors.BaseSelector) -> None:
    """Take what the children have written; output beyond its limit is read and dropped."""
    for event, _ in selector.select(POLL_SECONDS):
        child, limits = event.data
        data = os.read(event.fd, 65536)
        if not data:
            selector.unregister(event.fd)
        elif event.fd == child.result_fd:
            child.result += data
        elif len(child.output) < limits.output:
            child.output += data[: limits.output - len(child.output)]


def _finish(
    selector: selectors.BaseSelector, child: _Child, status: int | None, limits: Limits
) -> JobResult:
    """Kill what is left of the child's process group, read the rest, judge."""
    # The group outlives its first process: a submission may have forked.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if status is None:
        os.kill(child.pid, signal.SIGKILL)  # it may not have had a group of its own yet
        os.waitpid(child.pid, 0)
    while any(fd in selector.get_map() for fd in (child.result_fd, child.output_fd)):
        before = len(child.result)
        _read_ready(selector)
        # A process that left the group may hold the pipe open: what counts has arrived by now.
        if len(child.result) == before:
            break
    for fd in (child.result_fd, child.output_fd):
        if fd in selector.get_map():
            selector.unregister(fd)
        os.close(fd)
    seconds = time.monotonic() - child.started
    output = child.output.decode("utf-8", "replace")
    tasks = _read_result(bytes(child.result), child.key)
    if tasks is not None and status is not None:
        return JobResult(tuple(tasks), "", output, seconds)
    return JobResult((), _why(status, limits), output, seconds)


def _read_result(data: bytes, key: str) -> list[dict[str, Any]] | None:
    """The message, if it is exactly one and carries the run's key."""
    try:
        message = json.loads(data)
    except (ValueError, UnicodeDecodeError):
        return None
    if not isinstance(message, dict) or message.get("key") != key:
        return None
    return message["tasks"]


def _why(status: int | None, limits: Limits) -> str:
    if status is None:
        return f"no result within {limits.seconds:.0f} s: is there an endless loop?"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"no result: the program was ended by {name} (memory or file limit?)"
    return f"no result: the program ended itself with status {os.WEXITSTATUS(status)}"
