"""Group 2: every typical mistake fails its own task and is named; small mutations fail too."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from grader_tools import COURSE, copy_course
from minivllm.course.binding import units
from minivllm.course.kill_table import grade_here
from minivllm.course.mistakes import load_mistakes
from minivllm.course.runner import child_environment

CHAPTERS = pytest.mark.parametrize("chapter", COURSE.chapters, ids=lambda chapter: chapter.id)
ALL = [mistake for chapter in COURSE.chapters for mistake in load_mistakes(chapter.id)]
MISTAKES = pytest.mark.parametrize("mistake", ALL, ids=lambda m: f"{m.task}-{m.name}")
ALLOWED = Path(__file__).with_name("mutants_allowed.txt")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    return copy_course(tmp_path_factory.mktemp("course"))


def test_kill_table_has_no_fault(fresh, tmp_path):
    """One process, all chapters: exactly the own task fails, named, and no two agree."""
    target = tmp_path / "kills.json"
    command = [sys.executable, "-m", "minivllm.course", "kill-table", "--json", str(target)]
    environment = {**child_environment(), "MINIVLLM_COURSE": str(fresh.root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(target.read_text())) == len(ALL)


@CHAPTERS
def test_there_are_enough_mistakes(chapter):
    known = load_mistakes(chapter.id)
    assert len(known) >= 5
    assert {mistake.task for mistake in known} == {task.id for task in chapter.tasks}
    assert len({(m.task, m.name) for m in known}) == len(known)
    # A mistake that the engine shows makes `--engine` worth running.
    assert any(mistake.engine_visible for mistake in known)


@MISTAKES
def test_signatures_are_the_units(mistake):
    task = COURSE.task(mistake.task)
    reference = units("reference", [task.chapter], COURSE).of(task).value
    if not isinstance(reference, type):
        assert signature(mistake.unit) == signature(reference)
        return
    assert issubclass(mistake.unit, reference)
    own = [name for name, value in vars(mistake.unit).items() if inspect.isfunction(value)]
    for name in own:
        if hasattr(reference, name):
            assert signature(getattr(mistake.unit, name)) == signature(getattr(reference, name))


def signature(function):
    """Names, kinds and defaults; how a module spells the annotations is its own affair."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [m for m in ALL if m.engine_visible], ids=lambda m: f"{m.task}-{m.name}"
)
def test_visible_mistakes_fail_in_the_engine(mistake, tiny_model):
    """The engine (or the stage) that runs on the mistake writes something else, or stops."""
    from minivllm.course.engine_check import deviation, program_of, run_program

    task = COURSE.task(mistake.task)
    model = str(tiny_model("qwen3"))
    bound = units(f"mistake:{mistake.task}:{mistake.name}", [task.chapter], COURSE)
    expected = run_program(program_of(task), model, {})
    try:
        actual = run_program(program_of(task), model, bound.seated([task]))
    except Exception as error:
        assert not isinstance(error, NotImplementedError), error
        return
    assert deviation(actual, expected)


@pytest.mark.slow
@CHAPTERS
def test_small_mutations_of_the_solution_fail(fresh, chapter, tmp_path):
    """Operators, comparisons and constants changed one at a time; survivors must be listed."""
    solution = (fresh.root / "solutions" / chapter.file).read_text(encoding="utf-8")
    allowed = ALLOWED.read_text(encoding="utf-8").splitlines()
    survivors = []
    for name, text in mutants(solution, chapter):
        path = tmp_path / f"{chapter.id}_mutant.py"
        path.write_text(text, encoding="utf-8")
        grading, _ = grade_here(fresh, chapter, str(path))
        lost = any(result.state not in ("pass", "unavailable") for result in grading.results())
        if not lost and f"{chapter.id} {name}" not in allowed:
            survivors.append(f"{chapter.id} {name}")
    assert not survivors, "no visible test fails for:\n" + "\n".join(survivors)


SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutants(solution, chapter):
    """(what was done, text) for each small change inside a unit."""
    names = {unit.rpartition(".")[2] for task in chapter.tasks for unit in task.units}
    count = len(list(ast.walk(ast.parse(solution))))
    for index in range(count):
        tree = ast.parse(solution)
        inside = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in names
            for statement in node.body[ast.get_docstring(node) is not None :]
            for inner in ast.walk(statement)
        }
        node = list(ast.walk(tree))[index]
        if id(node) not in inside:
            continue
        name = mutate(node)
        if name:
            yield f"line {node.lineno}: {name}", ast.unparse(tree)


def mutate(node):
    """Change `node` in place; what was done, or nothing."""
    for field in ("op", "ops"):
        value = getattr(node, field, None)
        first = value[0] if isinstance(value, list) and value else value
        if type(first) in SWAPS:
            swapped = SWAPS[type(first)]()
            setattr(node, field, [swapped, *value[1:]] if isinstance(value, list) else swapped)
            return f"{type(first).__name__} became {type(swapped).__name__}"
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        node.value = not node.value
        return f"{not node.value} became {node.value}"
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value += 1
        return f"{node.value - 1} became {node.value}"
    return ""
