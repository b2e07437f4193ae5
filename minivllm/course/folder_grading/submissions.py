"""Finds each student's chapter files: plain folders, Gradescope exports, Classroom clones, Moodle.

Owns the reading of what others have sent. Only regular files called as the course calls them are
taken, copied by name into a folder of our own; links, conftests and all else are listed, not used.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from minivllm.course.table import Chapter

MAX_FILE_BYTES = 1_000_000
MOODLE = re.compile(r"^(?P<name>.+?)_(?P<id>\d+)_assignsubmission_[a-z]+_?(?P<rest>.*)$")
SKIPPED_FOLDERS = {".git", ".venv", "venv", "__pycache__", "node_modules", ".ipynb_checkpoints"}


@dataclass
class Submission:
    """What one student sent."""

    student: str
    files: dict[str, Path] = field(default_factory=dict)  # chapter -> our copy
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)  # sent, not used


@dataclass(frozen=True)
class Found:
    """One file of a submission: where in it, and its bytes (None: not usable)."""

    path: PurePosixPath
    data: bytes | None


def find_submissions(
    source: Path,
    chapters: Sequence[Chapter],
    target: Path,
    single: bool = False,
    not_due: Sequence[Chapter] = (),
) -> list[Submission]:
    """All submissions under `source`, their chapter files copied to `target`.

    single: the whole folder is one student's; not_due: chapters whose files come along in every
    clone and are no news. ValueError if there is nothing to grade.
    """
    if not source.exists():
        raise ValueError(f"there is no {str(source)!r}")
    sent: dict[str, list[Found]] = {}
    for student, found in _students(source, chapters, single):
        sent.setdefault(student, []).append(found)
    if not sent:
        raise ValueError(f"{str(source)!r} holds no submissions: a folder a student is expected")
    passed_over = {chapter.file for chapter in not_due}
    sent = {
        student: [found for found in files if found.path.name not in passed_over]
        for student, files in sent.items()
    }
    return [
        _take(student, files, chapters, target / f"{index:04d}")
        for index, (student, files) in enumerate(sorted(sent.items()))
    ]


def _students(
    source: Path, chapters: Sequence[Chapter], single: bool
) -> Iterator[tuple[str, Found]]:
    """Every file with its student's name, for each of the layouts."""
    if source.is_file():
        if not zipfile.is_zipfile(source):
            raise ValueError(f"{str(source)!r} is neither a folder nor a zip file")
        yield from _from_moodle(_read_zip(source.read_bytes()))
        return
    names = {chapter.file for chapter in chapters}
    if single or any((source / name).is_file() for name in names):
        for found in _read_folder(source):
            yield source.resolve().name, found
        return
    labels = _gradescope_names(source)
    for entry in sorted(source.iterdir()):
        if entry.is_symlink():
            continue
        if entry.is_dir() and entry.name not in SKIPPED_FOLDERS:
            moodle = MOODLE.match(entry.name)
            student = labels.get(entry.name) or (moodle["name"] if moodle else entry.name)
            files = list(_read_folder(entry))
            for found in files or [Found(PurePosixPath("nothing"), None)]:
                yield student, found
        elif MOODLE.match(entry.name) and entry.is_file():
            yield from _from_moodle([Found(PurePosixPath(entry.name), _read(entry))])


def _from_moodle(files: Sequence[Found]) -> Iterator[tuple[str, Found]]:
    """Moodle's download: `Name_123_assignsubmission_file_` as a folder or as a prefix."""
    for found in files:
        head = MOODLE.match(found.path.parts[0])
        # A zip of plain folders is accepted too: the first folder is the student.
        student = head["name"] if head else found.path.parts[0]
        rest = found.path.parts[1:] or ((head["rest"],) if head else ())
        inner = PurePosixPath(*rest) if rest else found.path
        if found.data is not None and inner.suffix == ".zip":
            for nested in _read_zip(found.data):
                yield student, nested
        else:
            yield student, Found(inner, found.data)


def _read_folder(folder: Path) -> Iterator[Found]:
    for base, folders, names in os.walk(folder):  # os.walk follows no links
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(base) / name
            inner = PurePosixPath(path.relative_to(folder).as_posix())
            if inner.suffix == ".zip" and (data := _read(path)):
                yield from _read_zip(data)
            else:
                yield Found(inner, _read(path))


def _read(path: Path) -> bytes | None:
    # A link could point at the solutions, a pipe would never end.
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        return path.read_bytes()
    except OSError:
        return None


def _read_zip(data: bytes) -> list[Found]:
    """The files of an archive; nothing is ever extracted to the names it gives."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [
                Found(
                    PurePosixPath(info.filename),
                    archive.read(info) if info.file_size <= MAX_FILE_BYTES else None,
                )
                for info in archive.infolist()
                if not info.is_dir()
            ]
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError):
        return [Found(PurePosixPath("(unreadable zip)"), None)]


def _gradescope_names(source: Path) -> dict[str, str]:
    """Folder -> student from submission_metadata.yml, read without a YAML library."""
    metadata = source / "submission_metadata.yml"
    if not metadata.is_file():
        return {}
    names: dict[str, str] = {}
    folder = ""
    for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
        head = re.match(r"(submission_\d+):", line)
        name = re.match(r"\s*-?\s*:name:\s*(.+)", line)
        if head:
            folder = head[1]
        elif name and folder and folder not in names:
            names[folder] = f"{name[1].strip().strip(chr(34))} ({folder})"
    return names


def _take(
    student: str, files: Sequence[Found], chapters: Sequence[Chapter], target: Path
) -> Submission:
    """Copy the chapter files; of several with one name the nearest to the top counts."""
    submission = Submission(student)
    wanted = {chapter.file: chapter.id for chapter in chapters}
    target.mkdir(parents=True)
    # Files in a folder called solutions are not the student's answers.
    for found in sorted(files, key=lambda f: ("solutions" in f.path.parts, len(f.path.parts))):
        chapter = wanted.get(found.path.name)
        if chapter is None or chapter in submission.files or found.data is None:
            submission.extra.append(str(found.path))
            continue
        submission.files[chapter] = target / found.path.name
        submission.files[chapter].write_bytes(found.data)
    submission.missing = [name for name, c in wanted.items() if c not in submission.files]
    # The course's own files come along in every clone; they are no news.
    submission.extra = [path for path in submission.extra if _notable(path)]
    return submission


def _notable(path: str) -> bool:
    name = PurePosixPath(path).name
    return name == "conftest.py" or re.match(r"ch\d\d_.*\.py$", name) is not None or "(" in name
