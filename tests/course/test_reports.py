"""Results, status, notebook table, sandbox, commands: what people read."""

import pytest

from course_tools import answer, make_course, solve
from minivllm.course import commands, status
from minivllm.course.notebook import to_table
from minivllm.course.report import gradescope, terminal_lines, total_line
from minivllm.course.results import (
    BLOCKED,
    BROKEN,
    PASS,
    TODO,
    UNAVAILABLE,
    WRONG,
    TestResult,
    summarize,
)
from minivllm.course.runner import ChildRun, run_tests
from minivllm.course.sandbox import describe, run_sandbox


def result(course, *tests):
    task = course.task("ch02.1")
    return summarize([task], [TestResult("ch02.1", f"t{i}", *t) for i, t in enumerate(tests)])[0]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((PASS, PASS), PASS),
        ((PASS, WRONG), WRONG),
        ((WRONG, TODO), TODO),
        ((TODO, BLOCKED), BLOCKED),
        ((BROKEN, BROKEN), BROKEN),
        ((UNAVAILABLE,), UNAVAILABLE),
        ((PASS, UNAVAILABLE), UNAVAILABLE),
        ((WRONG, UNAVAILABLE), WRONG),
        ((), "missing"),
    ],
)
def test_a_task_is_all_or_nothing(tmp_path, states, expected):
    found = result(make_course(tmp_path), *((state,) for state in states))
    assert found.state == expected
    assert found.earned == (2 if expected == PASS else 0)


def test_words(tmp_path):
    course = make_course(tmp_path)
    blocked = result(course, (BLOCKED, "ch01.1", "it calls ch01.1"))
    assert blocked.label == "blocked by ch01.1"
    hidden = TestResult("ch02.1", "h", WRONG, "values", "hidden test h: values", hidden=True)
    visible = TestResult("ch02.1", "v", WRONG, "values", "all of it")
    assert summarize([course.task("ch02.1")], [hidden, visible])[0].text == "all of it"
    lines = terminal_lines(course, [blocked])
    assert len(lines) == 2 and lines[1].startswith("0/2, next: ch01.1")  # what it waits for
    away = result(course, (UNAVAILABLE, "device", "needs a CUDA device"))
    assert total_line([away]) == "0/0, all done"
    assert gradescope([blocked])["tests"][0]["status"] == "failed"


def test_status_draws_bars_and_the_next_task(tmp_path, monkeypatch):
    course = make_course(tmp_path)
    monkeypatch.setattr(status, "is_edited", lambda course, chapter: chapter.id in ("ch01", "ch02"))
    solve(course, "ch01", "ch02")
    path = course.root / "exercises" / "ch02_counter.py"
    path.write_text(path.read_text().replace("math.fsum(self.items)", "0.0"))
    lines = status.status_lines(course)
    assert lines[0].startswith("ch01  [####################]  1/1") and "unlocked" in lines[0]
    assert lines[1].startswith("ch02  [########............]  2/5")
    assert lines[2].startswith("ch03  [....................]  0/4")
    assert lines[3] == "3/10 points; next: ch02.2 Counter.total (wrong)"


def test_notebook_tables_of_three_kinds(tmp_path):
    course = make_course(tmp_path)
    todo = to_table(course, "ch01", "exercises", run_tests(course, ["ch01"]))
    assert not todo.passed and "Not written yet" in str(todo) and "todo" in todo._repr_html_()
    answer(course, "ch01", "def scale(x, factor):\n    return x + factor\n")
    wrong = to_table(course, "ch01", "exercises", run_tests(course, ["ch01"]))
    assert "wrong" in str(wrong) and "expected" in str(wrong)
    assert "&gt;&gt;&gt; scale(" in wrong._repr_html_() and "mine: exercises" in wrong._repr_html_()
    solve(course, "ch01")  # the next check sees the new file
    right = to_table(course, "ch01", "exercises", run_tests(course, ["ch01"]))
    assert right.passed and "1 of 1" in right._repr_html_()
    reference = to_table(course, "ch01", "reference", run_tests(course, ["ch01"], "reference"))
    assert reference.owner == "reference" and "all units: reference" in reference._repr_html_()


def test_notebook_survives_an_endless_loop_and_a_crash(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch01", "def scale(x, factor):\n    while True: pass\n")
    table = to_table(course, "ch01", "exercises", run_tests(course, ["ch01"], seconds=6))
    assert "endless loop" in str(table) and "endless loop" in table._repr_html_()
    assert "no result" in to_table(course, "ch01", "exercises", ChildRun()).problem


def test_sandbox_prints_shapes(tmp_path, capsys):
    course = make_course(tmp_path)
    assert run_sandbox(course, "ch01", "solutions", interactive=False) == 0
    out = capsys.readouterr().out
    assert "# scale(x=[1] float32, factor=3.0) -> [1] float32" in out and "tensor([3.])" in out
    assert run_sandbox(course, "ch02", "solutions", interactive=False) == 0
    assert "# Counter.add(value=1.0) -> 1" in capsys.readouterr().out
    assert run_sandbox(course, "ch01", "exercises", interactive=False) == 1
    assert "NotImplementedError: ch01.1" in capsys.readouterr().out
    answer(course, "ch01", "def scale(:\n")
    assert run_sandbox(course, "ch01", "exercises", interactive=False) == 1
    assert "cannot be tried" in capsys.readouterr().out
    assert describe([1, 2]) == "[1, 2]" and describe("x" * 99).endswith("...")


def test_commands(tmp_path, monkeypatch, capsys):
    make_course(tmp_path)
    monkeypatch.setenv("MINIVLLM_COURSE", str(tmp_path))
    assert commands.main(["hint", "ch01.1"]) == 0
    assert "hint 1 of 3" in capsys.readouterr().out
    assert commands.main(["hint", "ch01.9"]) == 2
    assert "no task 'ch01.9'" in capsys.readouterr().err
    assert commands.main(["build", "--check"]) == 1  # its stubs are not in the real history
    assert commands.main(["try", "ch01", "--impl", "solutions"]) == 0
    monkeypatch.setenv("MINIVLLM_COURSE", str(tmp_path / "nowhere"))
    assert commands.main(["status"]) == 2
    with pytest.raises(SystemExit):
        commands.main(["no-such-command"])


def test_lab_copies_lessons_once(tmp_path, capsys):
    from minivllm.course.lab import open_lab

    course = make_course(tmp_path)
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "01_scale.ipynb").write_text('{"cells": []}')
    assert open_lab(course, launch=False) == 0
    (tmp_path / "work" / "01_scale.ipynb").write_text("mine")
    assert open_lab(course, launch=False) == 0
    assert (tmp_path / "work" / "01_scale.ipynb").read_text() == "mine"
    assert "kept your" in capsys.readouterr().out


def test_solved_units_for_use_mine(tmp_path, monkeypatch):
    from minivllm.course import stage_units

    course = make_course(tmp_path)
    monkeypatch.setattr(stage_units, "is_edited", lambda course, chapter: True)
    solve(course, "ch02", "ch03")
    answer(course, "ch01", "def scale(x, factor):\n    return x + factor\n")
    found = stage_units.solved_units(course)
    # The wrong one is left to the reference; the class of two chapters is the later one.
    assert set(found) == {"Counter", "counter"} and found["Counter"] is found["counter"]
    counter = found["Counter"]()
    counter.add(1.0)
    assert counter.drain() == 2.0
