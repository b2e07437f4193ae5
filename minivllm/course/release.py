"""`minivllm course release --student DIR`: the tree that students get.

Owns the list of what they get and the few texts that differ. Left out: solutions, the grader's
tests, the instructor's guide and answers, and the authors' commands. The engine stays and can be
read: the exercises are open-book. So do the typical mistakes, since a student's own machine runs
them to say what went wrong; their text tells no more than the reference beside them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from minivllm.course.cut import cut_chapter
from minivllm.course.root import TABLE
from minivllm.course.stubs import read_text, write_text
from minivllm.course.table import STUDENT, Course

# What goes out, in fnmatch's patterns on paths from the root; what is not named stays here.
RELEASED = (
    *("LICENSE", "README.md", "AGENTS.md", "Makefile", "pyproject.toml", ".gitignore"),
    *("constraints/*.txt", "minivllm/*", "tests/*"),
    *("exercises/README.md", "exercises/*.toml", "exercises/test_*.py", "exercises/conftest.py"),
    *("lessons/[0-9][0-9]_*.ipynb", "lessons/data/*", "lessons/figures/*"),
)
# The grader's own tests show right and wrong answers; the rest serves authors and instructors.
KEPT_BACK = (
    *("tests/grader/*", "tests/course/*", "tests/grader_tools.py", "tests/course_tools.py"),
    *("minivllm/course/folder_grading/*", "minivllm/course/kill_table.py"),
    *("minivllm/course/release.py", "minivllm/course/chapter_table.py"),
    *("*/__pycache__/*", "*.pyc", "*/.ipynb_checkpoints/*", "*.bak*", "*/.*_cache/*"),
)
FOLDERS = ("constraints", "exercises", "lessons", "minivllm", "tests")
# Lines that end with this comment, and blocks between its two forms, are for the full tree.
MARK, BEGIN, END = (f"<!-- full tree only{part} -->" for part in ("", ": begin", ": end"))
WORKFLOW = Path("lessons") / "instructors" / "classroom.yml"
WORKFLOW_HEAD = """\
# Runs your exercises at every push and shows a table of tasks. The job is green when every task
# passes; until then the table says what comes next.
"""


def release(course: Course, target: Path) -> list[str]:
    """Write the student's tree to `target` and say what it holds.

    target: a folder that does not exist, or is empty but for a .git. ValueError otherwise, and for
    a course folder without the package, which cannot be released.
    """
    target = target.resolve()
    if not (course.root / "minivllm").is_dir():
        raise ValueError(f"{course.root} holds no minivllm/: release from a full checkout")
    if target.exists() and (not target.is_dir() or {p.name for p in target.iterdir()} - {".git"}):
        raise ValueError(f"{target} is not empty: nothing is ever overwritten, name a new folder")
    if course.root in target.parents and target.parent != course.root / "work":
        raise ValueError(f"{target} lies inside the checkout: name a folder outside of it")
    names = list(released_files(course.root))
    for name in names:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(course.root / name, copy)
        if copy.suffix == ".md":
            write_text(copy, student_text(read_text(copy)))
    for chapter in course.chapters:
        # Cut anew: an instructor's own exercises may be half solved.
        write_text(target / "exercises" / chapter.file, cut_chapter(chapter, course).stub)
    _mark_edition(target / TABLE)
    workflow = read_text(course.root / WORKFLOW)
    body = re.sub(r"\A(#.*\n)+", "", workflow)
    write_text(target / ".github" / "workflows" / "exercises.yml", WORKFLOW_HEAD + body)
    points = sum(task.points for task in course.tasks)
    return [
        f"{target}: {len(names) + len(course.chapters) + 1} files, "
        f"{len(course.chapters)} chapters, {points} points",
        "left out: solutions/, the grader's tests, the instructor's guide and answers",
        "next: git init there, push it, and let students fork it or use it as a template",
    ]


def released_files(root: Path) -> Iterator[str]:
    """Paths from the root, with `/`, of all files that are copied as they are (or nearly)."""
    paths = [path for path in root.iterdir() if path.is_file()]
    for folder in FOLDERS:
        paths += [path for path in (root / folder).rglob("*") if path.is_file()]
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if _matches(name, RELEASED) and not _matches(name, KEPT_BACK):
            yield name


def student_text(text: str) -> str:
    """A Markdown text without what is marked as for the full tree."""
    text = re.sub(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}\n+", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.rstrip().endswith(MARK)]
    return "\n".join(lines) + "\n"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _mark_edition(path: Path) -> None:
    """Tell the commands that this is a student's tree: those of authors are not offered then."""
    text = read_text(path)
    head = "[course]\n"
    if head not in text:
        raise ValueError(f"{path.name} has no [course]")
    write_text(path, text.replace(head, f'{head}edition = "{STUDENT}"\n', 1))
