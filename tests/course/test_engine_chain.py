"""`--engine`, and with it `--chain`, on the real course's chapters 02 and 04."""

import pytest

from minivllm.course.kill_table import grade_here
from minivllm.course.table import load_course

SPOILT = """
_right = rms_norm


def rms_norm(x, weight, eps):
    return _right(x, weight, eps) * 1.05
"""


def grade(folder, *options, ch02=None):
    """Chapter 04's solution in a folder of answers, with the given chapter 02 beside it."""
    course = load_course()
    for chapter, text in (("ch02", ch02), ("ch04", "")):
        name = course.chapter(chapter).file
        if text is not None:
            solution = (course.root / "solutions" / name).read_text(encoding="utf-8")
            (folder / name).write_text(solution + text, encoding="utf-8")
    grading, output = grade_here(course, course.chapter("ch04"), str(folder), options)
    return grading.results()[0], output


def test_a_wrong_earlier_unit_blocks_the_engine_with_chain_only(tmp_path):
    result, output = grade(tmp_path, "--engine", ch02=SPOILT)
    assert result.state == "pass" and "engine[ch04.1]  pass  wrote: '" in output
    result, output = grade(tmp_path, "--engine", "--chain", ch02=SPOILT)
    assert result.label == "blocked by ch02.1" and "ch02.1 in engine: logits of step 0" in output
    assert "ch03 is not done (ch03.1, ch03.2): in the engine the reference stands in" in output
    assert "ch02 is not done" not in output


@pytest.mark.parametrize("ch02", ["", None, "\nbroken(\n"])
def test_right_or_missing_earlier_units_stop_nothing(tmp_path, ch02):
    result, output = grade(tmp_path, "--engine", "--chain", ch02=ch02)
    assert result.state == "pass"
    assert "as the reference)" in output and ("ch02 is not done" in output) == (ch02 != "")
