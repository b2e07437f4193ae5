"""README and the instructor's guide agree with the table and the constraints."""

import json
import re

import pytest

from course_tools import make_course
from grader_tools import COURSE, ROOT
from minivllm.course.chapter_table import BEGIN, END, table_lines, update_readme

README = (ROOT / "README.md").read_text(encoding="utf-8")
ANSWERS = (ROOT / "lessons" / "instructors" / "answers.md").read_text(encoding="utf-8")


def test_the_readmes_table_is_the_courses():
    shown = README.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0].splitlines()
    assert shown == table_lines(COURSE), "run: python -m minivllm.course readme"
    minutes = sum(chapter.minutes for chapter in COURSE.chapters)
    points = sum(task.points for task in COURSE.tasks if not task.bonus)
    assert shown[-1] == f"| | together | | {minutes} | {points} |"


def test_the_table_is_written_between_its_marks(tmp_path):
    course = make_course(tmp_path)
    with pytest.raises(FileNotFoundError):
        update_readme(course)
    readme = tmp_path / "README.md"
    readme.write_text("no marks\n")
    with pytest.raises(ValueError, match="has no <!-- chapters -->"):
        update_readme(course)
    readme.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    assert update_readme(course) == ["wrote the chapters into README.md"]
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith(f"{END}\nbelow\n") and "old" not in text
    # No lesson is there, so the chapter's title is no link.
    assert "| 02 | Counter | Count. | 5 | 5 |\n" in text
    assert update_readme(course) == ["README.md is up to date"]


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 200


def test_pinned_versions_are_the_tested_ones():
    """Every `name==version` in a guide is that of constraints/cpu.txt."""
    constraints = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^([\w-]+)==([\w.]+)", constraints, re.MULTILINE))
    guide = (ROOT / "lessons" / "INSTRUCTORS.md").read_text(encoding="utf-8")
    pins = re.findall(r"([\w-]+)==([\w.]+)", README + guide)
    assert ("torch", tested["torch"]) in pins
    assert [pin for pin in pins if tested.get(pin[0]) != pin[1]] == []


@pytest.mark.parametrize("chapter", COURSE.chapters, ids=lambda chapter: chapter.id)
def test_every_question_of_a_lesson_has_an_answer(chapter):
    path = ROOT / "lessons" / chapter.lesson
    if not path.is_file():
        pytest.skip(f"{chapter.lesson} is not written yet")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    asked = next("".join(c["source"]) for c in cells if "hree questions" in "".join(c["source"]))
    section = re.search(rf"^## {chapter.id[2:]} .*?(?=^## |\Z)", ANSWERS, re.DOTALL | re.MULTILINE)
    assert section, f"lessons/instructors/answers.md has no section ## {chapter.id[2:]}"
    numbers = [re.findall(r"^\d\. ", text, re.MULTILINE) for text in (asked, section[0])]
    assert numbers[0] and numbers[0] == numbers[1]
    points = sum(task.points for task in chapter.tasks)
    told = re.search(r"\((\d+) minutes", section[0])
    assert told and int(told[1]) == chapter.minutes
    worth = re.search(r"(\d+) points\)", section[0].splitlines()[0])
    assert worth is None or int(worth[1]) == points
