"""Cutting, building, merging: nothing drifts and no edit is ever lost."""

import ast
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_tools import answer, history, make_course, solve
from minivllm.course import stubs
from minivllm.course.cut import cut_chapter
from minivllm.course.merge import merge_lines
from minivllm.course.source import Import, render_imports
from minivllm.course.table import load_course


def stub_path(course, chapter="ch01"):
    return course.root / "exercises" / course.chapter(chapter).file


def test_solution_keeps_comments_and_stub_hides_them(tmp_path):
    course = make_course(tmp_path)
    text = cut_chapter(course.chapter("ch01"), course)
    assert "# A comment of the answer." in text.solution
    assert "comment of the answer" not in text.stub
    assert 'raise NotImplementedError("ch01.1: scale")' in text.stub
    assert "# TODO(ch01.1): multiply" in text.stub and ">>> scale(" in text.stub


def test_class_keeps_its_plumbing(tmp_path):
    course = make_course(tmp_path)
    text = cut_chapter(course.chapter("ch02"), course)
    assert "deque(maxlen=LIMIT)" in text.stub and "LIMIT = 3" in text.stub
    assert "import math" in text.stub and "fsum" not in text.stub
    assert "# Above the answer." in text.solution and "# Above the answer." not in text.stub
    # The unit of an earlier chapter is imported, never copied.
    assert "from minivllm.course.given import scale" in text.stub
    assert "def scale" not in text.solution


def test_extension_shows_only_its_own_methods(tmp_path):
    course = make_course(tmp_path)
    text = cut_chapter(course.chapter("ch03"), course)
    assert "class Counter(given.Counter):" in text.stub
    assert "def add" not in text.stub and "def drain" in text.stub


def test_generated_files_are_valid_and_formatted(tmp_path):
    course = make_course(tmp_path)
    for folder in ("exercises", "solutions"):
        for chapter in course.chapters:
            ast.parse((course.root / folder / chapter.file).read_text())
    command = [sys.executable, "-m", "ruff", "format", "--check", "--isolated", "--line-length=100"]
    done = subprocess.run([*command, str(tmp_path / "solutions")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_build_is_stable_and_checked(tmp_path):
    course = make_course(tmp_path)
    assert stubs.check(course, history(course)) == []
    assert stubs.build(course, history=history(course)) == ["nothing to do"]
    solution = course.root / "solutions" / "ch01_scale.py"
    solution.write_text(solution.read_text() + "\n")
    assert stubs.check(course, history(course)) == [
        "solutions/ch01_scale.py differs from what `build` would write"
    ]


def test_windows_line_ends_are_no_edit(tmp_path):
    course = make_course(tmp_path)
    path = stub_path(course)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert not stubs.is_edited(course, course.chapter("ch01"), history(course))


def test_build_never_overwrites_an_edit(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch01", "mine\n")
    assert any("kept your" in line for line in stubs.build(course, history=history(course)))
    assert stub_path(course).read_text() == "mine\n"
    stubs.build(course, force=True, history=history(course))
    assert stub_path(course).with_name("ch01_scale.py.bak").read_text() == "mine\n"
    # A second time the first backup stays.
    answer(course, "ch01", "mine again\n")
    stubs.build(course, force=True, history=history(course))
    assert stub_path(course).with_name("ch01_scale.py.bak").read_text() == "mine\n"
    assert stub_path(course).with_name("ch01_scale.py.bak2").read_text() == "mine again\n"


def test_reset_keeps_the_edit_beside_the_stub(tmp_path):
    course = make_course(tmp_path)
    stub = stub_path(course).read_text()
    answer(course, "ch01", "mine\n")
    stubs.reset(course, course.chapter("ch01"), history(course))
    assert stub_path(course).read_text() == stub
    assert stub_path(course).with_name("ch01_scale.py.bak").read_text() == "mine\n"


def change_table(course, old, new):
    table = course.root / "exercises" / "course.toml"
    table.write_text(table.read_text().replace(old, new))
    return load_course(course.root)


def test_update_merges_a_new_contract_into_an_answer(tmp_path):
    course = make_course(tmp_path)
    path = stub_path(course)
    mine = path.read_text().replace(
        'raise NotImplementedError("ch01.1: scale")', "y = x * factor\n    return y"
    )
    path.write_text(mine)
    course = change_table(course, '"""x times factor."""', '"""x times the factor, exactly."""')
    assert "merged" in stubs.update(course, history(course))[0]
    merged = path.read_text()
    assert "y = x * factor" in merged and "the factor, exactly" in merged
    assert "raise NotImplementedError(" not in merged
    # And an untouched stub is simply replaced.
    assert "course update" not in merged


def test_update_keeps_both_sides_of_a_conflict(tmp_path):
    course = make_course(tmp_path)
    path = stub_path(course)
    path.write_text(path.read_text().replace("# TODO(ch01.1): multiply", "# my remark"))
    course = change_table(course, 'todo = "multiply"', 'todo = "multiply each"')
    stubs.update(course, history(course))
    text = path.read_text()
    assert "# my remark" in text and "multiply each" in text
    ast.parse(text)


def test_update_replaces_untouched_stubs_and_leaves_solved_ones(tmp_path):
    course = make_course(tmp_path)
    solve(course, "ch02")
    solved = stub_path(course, "ch02").read_text()
    course = change_table(course, '"""x times factor."""', '"""New."""')
    stubs.update(course, history(course))
    assert "New." in stub_path(course).read_text()
    assert stub_path(course, "ch02").read_text() == solved


LINES = st.lists(st.sampled_from(["a", "b", "c", "def f():", "    return 1", ""]), max_size=12)


@settings(max_examples=300, deadline=None)
@given(base=LINES, mine=LINES, new=LINES)
def test_merge_loses_none_of_the_students_lines(base, mine, new):
    """Every line that the student added is in the result at least as often."""
    marked = [f"{line}  # mine" if i % 2 else line for i, line in enumerate(mine)]
    merged, conflicts = merge_lines(base, marked, new, "ch01")
    for line in set(marked):
        if line not in base:
            assert merged.count(line) >= marked.count(line)
    if base == new:
        assert merged == marked and conflicts == 0
    if base == marked:
        assert merged == new and conflicts == 0


def test_imports_are_sorted_and_collisions_refused():
    lines = render_imports(
        [Import("torch"), Import("math"), Import("minivllm.engine.sequence", "Status")]
    )
    assert lines == [
        "from __future__ import annotations",
        "",
        "import math",
        "",
        "import torch",
        "",
        "from minivllm.course.given import Status",
    ]
    with pytest.raises(ValueError, match="Sequence comes from"):
        render_imports(
            [Import("collections.abc", "Sequence"), Import("minivllm.engine.sequence", "Sequence")]
        )
