"""Group 1: nothing for stubs, everything for solutions and the reference; the table adds up."""

import ast
import re

import pytest

from grader_tools import COURSE, ROOT, copy_course
from minivllm.course import stubs
from minivllm.course.cut import cut_chapter
from minivllm.course.forbidden import find_violations
from minivllm.course.hints import load_hints
from minivllm.course.kill_table import grade_here
from minivllm.course.source import Source

CHAPTERS = pytest.mark.parametrize("chapter", COURSE.chapters, ids=lambda chapter: chapter.id)
TASKS = pytest.mark.parametrize("task", COURSE.tasks, ids=lambda task: task.id)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The course with untouched stubs."""
    return copy_course(tmp_path_factory.mktemp("course"))


@CHAPTERS
def test_stubs_score_nothing_in_one_line_a_task(fresh, chapter):
    grading, output = grade_here(fresh, chapter, "exercises")
    results = grading.results()
    assert [result.state for result in results] == ["todo"] * len(chapter.tasks), output
    assert "Traceback" not in output
    for task in chapter.tasks:
        assert len(re.findall(rf"^{re.escape(task.id)} ", output, flags=re.M)) == 1


@CHAPTERS
@pytest.mark.parametrize("impl", ["solutions", "reference"])
def test_solutions_and_reference_score_everything(fresh, chapter, impl):
    grading, output = grade_here(fresh, chapter, impl)
    for result in grading.results():
        assert result.state in ("pass", "unavailable"), output


def test_points_stay_within_the_plan():
    """100 points without the bonus, once all chapters are there."""
    assert sum(task.points for task in COURSE.tasks if not task.bonus) <= 100
    assert all(task.points > 0 for task in COURSE.tasks)


def test_solutions_are_fresh_and_the_current_stubs_are_in_the_list():
    """The exercises may be a student's answers; what is generated may not differ."""
    history = stubs.StubHistory()
    for chapter in COURSE.chapters:
        text = cut_chapter(chapter, COURSE)
        path = ROOT / "solutions" / chapter.file
        assert path.read_text(encoding="utf-8") == text.solution, f"{path}: run course build"
        assert history.knows(chapter, text.stub), f"{chapter.id}: run course build"
        assert path.with_suffix(".md").is_file()


def test_hints_are_complete():
    load_hints(COURSE)


@TASKS
def test_units_are_short_and_use_what_is_allowed(task):
    """At most 30 code lines; comments, blank lines and the docstring do not count."""
    source = Source(task.source)
    for unit in task.units:
        node = source.find(unit)
        used = {n.lineno for n in ast.walk(node) if hasattr(n, "lineno") and n is not node}
        doc = node.body[0] if ast.get_docstring(node) is not None else None
        skipped = set(range(doc.lineno, doc.end_lineno + 1)) if doc else set()
        assert len(used - skipped) <= 30, f"{unit} has {len(used - skipped)} code lines"


@CHAPTERS
def test_solutions_keep_the_rules_for_students(chapter):
    tree = ast.parse(cut_chapter(chapter, COURSE).solution)
    assert find_violations(tree, chapter) == ()


@CHAPTERS
def test_tests_are_written_as_the_course_wants(chapter):
    """Each says in words what it checks, belongs to a task, and each task runs its example."""
    path = ROOT / "exercises" / chapter.test_file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    examples = set()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        marks = [ast.unparse(d) for d in node.decorator_list]
        task = next((m for m in marks if m.startswith("pytest.mark.task(")), None)
        assert task, f"{node.name} has no task"
        assert ast.get_docstring(node), f"{node.name} does not say what it checks"
        if "check.example()" in ast.unparse(node):
            examples.add(task.split("'")[1])
    assert examples == {task.id for task in chapter.tasks}
