"""README and the instructor's guide agree with the table and the constraints."""

import json
import re

import pytest

from course_tools import make_course
from grader_tools import COURSE, ROOT
from minivllm.course.chapter_table import BEGIN, END, table_lines, update_readme
from minivllm.course.lessons import lesson_paths

README = (ROOT / "README.md").read_text(encoding="utf-8")
ANSWERS = (ROOT / "lessons" / "instructors" / "answers.md").read_text(encoding="utf-8")


def test_the_readmes_table_is_the_courses():
    shown = README.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0].splitlines()
    assert shown == table_lines(COURSE), "run: python -m minivllm.course readme"
    for chapter in COURSE.chapters:
        points = sum(task.points for task in chapter.tasks if not task.bonus)
        (row,) = [line for line in shown if line.startswith(f"| {chapter.id[2:]} |")]
        assert f"| {chapter.minutes} | {points}" in row and chapter.title in row
    points = sum(task.points for task in COURSE.tasks if not task.bonus)
    assert shown[-1].endswith(f" | {points} |")


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


def test_the_readmes_speed_is_the_recorded_one():
    figures = []
    for name in ("offline", "offline_fp8"):
        record = json.loads((ROOT / "lessons" / "data" / f"{name}.json").read_text())
        figures.append(f"{record['best']['output_tokens_per_s']:,.0f}")
        if name == "offline":
            assert f"{100 * record['roofline']['share']:.0f} % of the roofline" in README
    assert all(figure in README for figure in figures), figures


def test_pinned_versions_are_the_tested_ones():
    """Every `name==version` in a guide is that of constraints/cpu.txt."""
    constraints = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^([\w-]+)==([\w.]+)", constraints, re.MULTILINE))
    guide = (ROOT / "lessons" / "INSTRUCTORS.md").read_text(encoding="utf-8")
    pins = re.findall(r"([\w-]+)==([\w.]+)", README + guide)
    assert ("torch", tested["torch"]) in pins
    assert [pin for pin in pins if tested.get(pin[0]) != pin[1]] == []


@pytest.mark.parametrize("path", lesson_paths(COURSE), ids=lambda path: path.stem)
def test_every_question_of_a_lesson_has_an_answer(path):
    number = path.name[:2]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    asked = ["".join(cell["source"]).partition("## Three questions\n")[2] for cell in cells]
    questions = re.findall(r"^\d\. ", "".join(asked), re.MULTILINE)
    section = re.search(rf"^## {number} .*?(?=^## |\Z)", ANSWERS, re.DOTALL | re.MULTILINE)
    assert section, f"lessons/instructors/answers.md has no section ## {number}"
    assert questions == re.findall(r"^\d\. ", section[0], re.MULTILINE) == ["1. ", "2. ", "3. "]
    row = next(line for line in table_lines(COURSE) if line.startswith(f"| {number} |"))
    minutes, points = row.split("|")[-3:-1]
    head = section[0].splitlines()[0]
    assert f"({minutes.strip()} minutes" in head
    told = re.search(r"(\d+) points\)", head)
    assert told is None or told[1] == points.strip()


def test_a_lesson_without_tasks_tells_its_own_minutes(tmp_path):
    course = make_course(tmp_path)
    (tmp_path / "lessons").mkdir()
    text = "# 00 Tour\n**Goal.** Look.\n**Before.** None. **Time.** 15 minutes. More.\n\nText"
    cell = {"cell_type": "markdown", "source": [text]}
    tour = tmp_path / "lessons" / "00_tour.ipynb"
    tour.write_text(json.dumps({"cells": [cell]}))
    lines = table_lines(course)
    assert lines[2] == "| 00 | [Tour](lessons/00_tour.ipynb) | Look. | 15 | - |"
    assert lines[-1] == "| | together | | 30 | 10 |"
    tour.write_text(json.dumps({"cells": [{**cell, "source": ["no title"]}]}))
    with pytest.raises(ValueError, match=r"00_tour.ipynb: its first cell"):
        table_lines(course)
