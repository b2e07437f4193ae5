"""`minivllm course grade DIR`: a folder of submissions to points and feedback.

Owns the command: finding submissions, grading each chapter in a child of its own, writing reports.
Linux only, since it rests on fork and resource limits. The threat model is mistakes and casual
cheating; `lessons/INSTRUCTORS.md` gives a container line for more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.course.table import Course

if TYPE_CHECKING:
    from minivllm.course.folder_grading.children import Job


def grade_folder(course: Course, args: argparse.Namespace) -> int:
    """Grade everything in `args.folder`; 0 when all could be graded (whatever the points)."""
    if not sys.platform.startswith("linux"):
        raise ValueError(
            f"`course grade` needs Linux (fork and resource limits), this is {sys.platform}; "
            "`pytest exercises/ --impl FOLDER` grades one submission anywhere"
        )
    # Imported here: `resource` and fork exist on Linux, this message everywhere.
    from minivllm.course.folder_grading.children import Job, Limits, prepare_parent
    from minivllm.course.folder_grading.hidden import refuse_wrong_tests
    from minivllm.course.folder_grading.jobs import run_jobs
    from minivllm.course.folder_grading.reports import StudentGrade, write_reports
    from minivllm.course.folder_grading.submissions import find_submissions

    chapters = [course.chapter(name) for name in args.chapters or [c.id for c in course.chapters]]
    hidden = args.hidden.resolve() if args.hidden else None
    if hidden and not hidden.is_dir():
        raise ValueError(f"--hidden {str(hidden)!r} is not a folder")
    with tempfile.TemporaryDirectory(prefix="course-grade-") as scratch:
        # Read before anything runs: no submission can reach another's files afterwards.
        submissions = find_submissions(
            args.folder,
            chapters,
            Path(scratch) / "submissions",
            single=bool(args.gradescope),
            not_due=[chapter for chapter in course.chapters if chapter not in chapters],
        )
        prepare_parent()
        limits, at_once = Limits(seconds=args.seconds), max(args.jobs, 1)
        if hidden:
            refuse_wrong_tests(course, chapters, hidden, limits, Path(scratch) / "hidden", at_once)
        jobs = [
            Job(course, submission.files[chapter.id], chapter, hidden)
            for submission in submissions
            for chapter in chapters
            if chapter.id in submission.files
        ]
        with _progress(len(submissions), jobs) as on_end:
            results = run_jobs(jobs, limits, Path(scratch) / "runs", at_once, on_end)
    grades = []
    for submission in submissions:
        own = {chapter: results[file] for chapter, file in submission.files.items()}
        grades.append(StudentGrade.collect(course, chapters, submission, own))
    write_reports(course, grades, args)
    return 0


@contextmanager
def _progress(total: int, jobs: Sequence[Job]) -> Iterator[Callable[[Job], None]]:
    """A bar over submissions, where stderr is a terminal; gives what to call as each job ends."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread of its own: this process is going to fork

    left = Counter(job.file.parent for job in jobs)  # each submission has a folder of ours
    with Bar(total=total, desc="graded", unit="submission", disable=None) as bar:
        bar.update(total - len(left))  # those that sent nothing

        def on_end(job: Job) -> None:
            left[job.file.parent] -= 1
            bar.update(left[job.file.parent] == 0)

        yield on_end
