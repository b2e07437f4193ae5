"""The commands of `minivllm course ...` and `python -m minivllm.course ...`.

Owns the argument parser and the exit codes; each command's work is in the module it names. torch is
imported only by the commands that run a student's code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minivllm.course.table import STUDENT, Course, load_course

Command = Callable[[argparse.Namespace], int]


def add_course_parser(subparsers: Any) -> None:
    """Add `course` to the subparsers of another command line; it sets `args.run`."""
    parser = subparsers.add_parser("course", help="stubs, hints, grading and lessons of the course")
    _add_commands(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 not all is well, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.course", description=__doc__)
    _add_commands(parser)
    args = parser.parse_args(argv)
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Run a parsed command; a wrong name or folder is one line on stderr, no traceback."""
    try:
        return int(args.run(args))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, work: Command, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=work)
        return sub

    add("status", _status, "a bar for each chapter and the next task")
    hint = add("hint", _hint, "the next hint for a task")
    hint.add_argument("task", nargs="?", help="such as ch02.1; the next open task by default")
    hint.add_argument("--level", type=int, choices=(1, 2, 3), help="show this level")
    tried = add("try", _try, "run the examples with your code and print shapes")
    tried.add_argument("chapter", nargs="?", help="such as ch02; the next open one by default")
    tried.add_argument("--impl", default="exercises", help="whose answers (default: exercises)")
    tried.add_argument("-i", "--interactive", action="store_true", help="then give a prompt")
    reset = add("reset", _reset, "put a chapter's stub back; your file is kept as .bak")
    reset.add_argument("chapter")
    add("update", _update, "bring new stubs into your files, keeping your edits")
    lab = add("lab", _lab, "copy the lessons to work/ and open JupyterLab there")
    lab.add_argument("--no-open", action="store_true", help="only copy")
    lab.add_argument("--no-browser", action="store_true", help="start it and print its address")
    lab.add_argument("--port", type=int, default=8888, help="the first port to try (8888)")
    lessons = add("lessons", _lessons, "execute the lessons in place (`make lessons`)")
    lessons.add_argument("names", nargs="*", help="chapters; all by default")
    # A student's tree lacks what these need, and some would spoil the exercises.
    if not _is_students():
        _add_authors_commands(add)


def _add_authors_commands(add: Callable[[str, Command, str], argparse.ArgumentParser]) -> None:
    build = add("build", _build, "generate stubs and solutions from the package (authors)")
    build.add_argument("--check", action="store_true", help="only say what differs; exit 1 if any")
    build.add_argument("--force", action="store_true", help="replace edited files, keeping a .bak")
    kill = add("kill-table", _kill_table, "which mistake fails which task (authors)")
    kill.add_argument("chapters", nargs="*")
    kill.add_argument("--json", type=Path, metavar="FILE")
    add("readme", _readme, "write the table of chapters into README.md (authors)")
    released = add("release", _release, "write the tree for students (instructors)")
    released.add_argument("--student", type=Path, required=True, metavar="DIR", help="a new folder")
    _add_grade(add("grade", _grade, "grade a folder of submissions (instructors)"))


def _is_students() -> bool:
    """Whether this is a student's tree; no course at all is for the command itself to report."""
    try:
        return load_course().edition == STUDENT
    except (ValueError, OSError):
        return False


def _add_grade(grade: argparse.ArgumentParser) -> None:
    grade.add_argument("folder", type=Path, metavar="DIR")
    grade.add_argument("--json", type=Path, metavar="FILE", help="all results as one JSON file")
    grade.add_argument("--csv", type=Path, metavar="FILE", help="one row a student")
    grade.add_argument("--feedback", type=Path, metavar="DIR", help="one text file a student")
    grade.add_argument("--hidden", type=Path, metavar="DIR", help="more tests, of your own")
    grade.add_argument("--chapters", nargs="+", help="only these; all by default")
    grade.add_argument("--jobs", type=_positive(int), default=1, help="children at a time")
    grade.add_argument("--seconds", type=_positive(float), default=60, help="limit for a chapter")
    grade.add_argument("--gradescope", type=Path, metavar="FILE", help="results.json of one")


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that must be above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it for text that is no number
    return parse


def _say(lines: Sequence[str]) -> int:
    print("\n".join(lines))
    return 0


def _status(args: argparse.Namespace) -> int:
    from minivllm.course.status import status_lines

    return _say(status_lines(load_course()))


def _hint(args: argparse.Namespace) -> int:
    from minivllm.course.hints import LEVELS, next_hint

    course = load_course()
    task = args.task or _next_open(course)
    if "." not in task:
        raise ValueError(f"hints belong to tasks: try `hint {course.select(task)[0].id}`")
    hint = next_hint(course, task, args.level)
    last = args.level is not None or hint.level == len(LEVELS)
    more = "" if last else " (run it again for the next one)"
    return _say([f"{hint.task}, hint {hint.level} of {len(LEVELS)}{more}", hint.text])


def _try(args: argparse.Namespace) -> int:
    from minivllm.course.sandbox import run_sandbox

    course = load_course()
    chapter = args.chapter or _next_open(course)
    return run_sandbox(course, chapter, args.impl, args.interactive)


def _next_open(course: Course) -> str:
    from minivllm.course.status import next_open

    task = next_open(course)
    if task is None:
        raise ValueError("all tasks pass: name the one you mean")
    return task.id


def _reset(args: argparse.Namespace) -> int:
    from minivllm.course import stubs

    course = load_course()
    return _say(stubs.reset(course, course.chapter(args.chapter)))


def _update(args: argparse.Namespace) -> int:
    from minivllm.course import stubs

    return _say(stubs.update(load_course()))


def _build(args: argparse.Namespace) -> int:
    from minivllm.course import stubs

    course: Course = load_course()
    if not args.check:
        return _say(stubs.build(course, force=args.force))
    problems = stubs.check(course)
    _say(problems or ["stubs and solutions are up to date"])
    return int(bool(problems))


def _kill_table(args: argparse.Namespace) -> int:
    from minivllm.course.kill_table import main as kill_table

    return kill_table(load_course(), args.chapters, args.json)


def _lab(args: argparse.Namespace) -> int:
    from minivllm.course.lab import open_lab

    return open_lab(load_course(), not args.no_open, not args.no_browser, args.port)


def _lessons(args: argparse.Namespace) -> int:
    from minivllm.course.lessons import execute_lessons

    return execute_lessons(load_course(), args.names)


def _readme(args: argparse.Namespace) -> int:
    from minivllm.course.chapter_table import update_readme

    return _say(update_readme(load_course()))


def _release(args: argparse.Namespace) -> int:
    from minivllm.course.release import release

    return _say(release(load_course(), args.student))


def _grade(args: argparse.Namespace) -> int:
    from minivllm.course.folder_grading import grade_folder

    return grade_folder(load_course(), args)
