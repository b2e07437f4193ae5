"""`minivllm course grade DIR`: a folder of submissions to points and feedback.

Owns the command: finding submissions, grading each chapter in a child of its own, writing reports.
Linux only, since it rests on fork and resource limits. The threat model is mistakes and casual
cheating; `lessons/INSTRUCTORS.md` gives a container line for more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from minivllm.course.table import Course


def grade_folder(course: Course, args: argparse.Namespace) -> int:
    """Grade everything in `args.folder`; 0 when all could be graded (whatever the points)."""
    if not sys.platform.startswith("linux"):
        raise ValueError(
            f"`course grade` needs Linux (fork and resource limits), this is {sys.platform}; "
            "`pytest exercises/ --impl FOLDER` grades one submission anywhere"
        )
    # Imported here: `resource` and fork exist on Linux, this message everywhere.
    from minivllm.course.folder_grading.children import Job, Limits, prepare_parent, run_jobs
    from minivllm.course.folder_grading.reports import StudentGrade, write_reports
    from minivllm.course.folder_grading.submissions import find_submissions

    chapters = [course.chapter(name) for name in args.chapters or [c.id for c in course.chapters]]
    hidden = args.hidden.resolve() if args.hidden else None
    if hidden and not hidden.is_dir():
        raise ValueError(f"--hidden {str(hidden)!r} is not a folder")
    with tempfile.TemporaryDirectory(prefix="course-grade-") as scratch:
        # Read before anything runs: no submission can reach another's files afterwards.
        submissions = find_submissions(
            args.folder, chapters, Path(scratch) / "submissions", single=bool(args.gradescope)
        )
        prepare_parent()
        jobs = [
            Job(course, submission.files[chapter.id], chapter, hidden)
            for submission in submissions
            for chapter in chapters
            if chapter.id in submission.files
        ]
        limits = Limits(seconds=args.seconds)
        results = run_jobs(jobs, limits, Path(scratch) / "runs", max(args.jobs, 1))
    grades = []
    for submission in submissions:
        own = {chapter: results[file] for chapter, file in submission.files.items()}
        grades.append(StudentGrade.collect(course, chapters, submission, own))
    write_reports(course, grades, args)
    return 0
