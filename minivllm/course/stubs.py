"""The generated files on disk: build, check, update and reset, without ever losing an edit.

Owns the history of stubs in `data/stubs/`. A file in `exercises/` whose text is in that history is
untouched and may be replaced; any other text is a student's work and is never overwritten.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from minivllm.course.cut import cut_chapter
from minivllm.course.merge import merge_lines
from minivllm.course.table import Chapter, Course

HISTORY = Path(__file__).parent / "data" / "stubs"


def read_text(path: Path) -> str:
    """Text with `\\n` line ends, so that a checkout on Windows has the same hash."""
    return path.read_text(encoding="utf-8").replace("\r\n", "\n")


def write_text(path: Path, text: str) -> None:
    """Write with `\\n` line ends on every system."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))


def digest(text: str) -> str:
    """Twelve hex digits that identify a file's text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


@dataclass(frozen=True)
class StubHistory:
    """Every stub ever generated, one text file each, named by its hash."""

    folder: Path = HISTORY

    def texts(self, chapter: Chapter) -> list[str]:
        """All stubs that this chapter has had."""
        return [read_text(path) for path in sorted((self.folder / chapter.id).glob("*.txt"))]

    def knows(self, chapter: Chapter, text: str) -> bool:
        """Whether `text` is exactly one of them."""
        path = self.folder / chapter.id / f"{digest(text)}.txt"
        return path.is_file() and read_text(path) == text

    def add(self, chapter: Chapter, text: str) -> None:
        """Remember a stub."""
        if not self.knows(chapter, text):
            write_text(self.folder / chapter.id / f"{digest(text)}.txt", text)

    def nearest(self, chapter: Chapter, text: str) -> str | None:
        """The stub that an edited file started from: the one most like it."""

        def likeness(stub: str) -> float:
            matcher = difflib.SequenceMatcher(a=stub.splitlines(), b=text.splitlines())
            return matcher.ratio()

        return max(self.texts(chapter), key=likeness, default=None)


def is_edited(course: Course, chapter: Chapter, history: StubHistory | None = None) -> bool:
    """Whether the exercise file exists and is no generated stub."""
    path = course.root / "exercises" / chapter.file
    history = history or StubHistory()
    return path.is_file() and not history.knows(chapter, read_text(path))


def build(course: Course, force: bool = False, history: StubHistory | None = None) -> list[str]:
    """Write solutions and stubs; edited exercises are kept (`force`: a .bak is). Says what it did.

    The new stub joins the history first, so a run that is interrupted loses nothing either.
    """
    history = history or StubHistory()
    messages = []
    for chapter in course.chapters:
        text = cut_chapter(chapter, course)
        history.add(chapter, text.stub)
        messages += _write_if_new(course.root / "solutions" / chapter.file, text.solution)
        path = course.root / "exercises" / chapter.file
        if is_edited(course, chapter, history):
            if not force:
                messages.append(f"kept your {_relative(path)}; `update` brings in the new stub")
                continue
            messages.append(f"your text is in {_relative(keep_backup(path))}")
        messages += _write_if_new(path, text.stub)
    return messages or ["nothing to do"]


def check(course: Course, history: StubHistory | None = None) -> list[str]:
    """What differs from a fresh build, one line a file; empty when all is byte-identical."""
    history = history or StubHistory()
    problems = []
    for chapter in course.chapters:
        text = cut_chapter(chapter, course)
        for folder, wanted in (("solutions", text.solution), ("exercises", text.stub)):
            path = course.root / folder / chapter.file
            if not path.is_file():
                problems.append(f"{_relative(path)} is missing")
            elif path.read_bytes() != wanted.encode("utf-8"):
                problems.append(f"{_relative(path)} differs from what `build` would write")
        if not history.knows(chapter, text.stub):
            problems.append(f"{chapter.id}: the current stub is not in the list of stubs")
    return problems


def update(course: Course, history: StubHistory | None = None) -> list[str]:
    """Merge new stubs into edited exercises and replace untouched ones. Says what it did."""
    history = history or StubHistory()
    messages = []
    for chapter in course.chapters:
        path = course.root / "exercises" / chapter.file
        stub = cut_chapter(chapter, course).stub
        if not is_edited(course, chapter, history):
            messages += _write_if_new(path, stub)
            continue
        mine = read_text(path)
        base = history.nearest(chapter, mine)
        if base is None or base == stub:
            messages.append(f"{_relative(path)} is up to date, your edits are kept")
            continue
        merged, conflicts = merge_lines(
            base.splitlines(), mine.splitlines(), stub.splitlines(), chapter.id
        )
        backup = keep_backup(path)
        write_text(path, "\n".join(merged) + "\n")
        note = f", {conflicts} places to look at (search for `course update`)" if conflicts else ""
        messages.append(f"merged the new stub into {_relative(path)}{note}; before: {backup.name}")
    return messages


def reset(course: Course, chapter: Chapter, history: StubHistory | None = None) -> list[str]:
    """Put the stub back; an edited file stays beside it as .bak."""
    path = course.root / "exercises" / chapter.file
    messages = []
    if is_edited(course, chapter, history):
        backup = _relative(keep_backup(path))
        messages.append(f"your text is in {backup}; to have it back: mv {backup} {_relative(path)}")
    write_text(path, cut_chapter(chapter, course).stub)
    return [*messages, f"{_relative(path)} is the stub again"]


def keep_backup(path: Path) -> Path:
    """Copy `path` to a new name.bak, .bak2, ...: an older backup is never overwritten."""
    number = 1
    while True:
        backup = path.with_name(f"{path.name}.bak{number if number > 1 else ''}")
        if not backup.exists():
            backup.write_bytes(path.read_bytes())
            return backup
        number += 1


def _write_if_new(path: Path, text: str) -> list[str]:
    if path.is_file() and path.read_bytes() == text.encode("utf-8"):
        return []
    write_text(path, text)
    return [f"wrote {_relative(path)}"]


def _relative(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
