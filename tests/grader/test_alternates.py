"""Group 3: right answers in another style get full marks."""

import pytest

from grader_tools import ALTERNATES, COURSE
from minivllm.course.kill_table import grade_here

FILES = sorted(ALTERNATES.glob("ch*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_alternate_gets_full_marks(path):
    chapter = COURSE.chapter(path.stem)
    grading, output = grade_here(COURSE, chapter, str(path))
    assert all(result.state in ("pass", "unavailable") for result in grading.results()), output


def test_every_chapter_has_one():
    assert {path.stem[:4] for path in FILES} >= {chapter.id for chapter in COURSE.chapters}
