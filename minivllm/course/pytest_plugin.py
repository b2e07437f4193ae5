"""The pytest side of the course: options, the `check` fixture, labels and the table at the end.

Owns nothing but hooks; what a result is stands in grading.py. It is loaded for every pytest run of
the repository, so it imports no torch and stays silent where no test carries a `task` mark.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minivllm.course.results import PASS, UNAVAILABLE, WORDS, WRONG, Failed, TestResult
from minivllm.course.root import find_root

if TYPE_CHECKING:
    from minivllm.course.checks import Check
    from minivllm.course.grading import Grading

GRADING = pytest.StashKey["Grading"]()
LETTERS = {PASS: ".", WRONG: "W", "todo": "T", "broken": "B", "blocked": "b", UNAVAILABLE: "-"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("course", "minivllm course")
    group.addoption(
        "--impl",
        default=os.environ.get("MINIVLLM_IMPL", "exercises"),
        help="whose answers: exercises (default), solutions, reference, or a folder or file",
    )
    group.addoption(
        "--task",
        action="append",
        default=[],
        metavar="ID",
        help="only this task or chapter; repeatable",
    )
    group.addoption(
        "--chain",
        action="store_true",
        help="earlier chapters from --impl as well; with --engine, in the engine too",
    )
    group.addoption("--engine", action="store_true", help="also run the answers in the engine")
    group.addoption(
        "--engine-model", default="tiny", metavar="MODEL", help="for --engine (default: tiny)"
    )
    group.addoption("--grade-json", metavar="FILE", help="write Gradescope's JSON + progress.json")
    group.addoption("--hidden", metavar="DIR", help="add an instructor's tests from this folder")
    group.addoption("--course-threads", type=int, default=1, metavar="N", help="torch's threads")
    group.addoption("--course-seed", type=int, metavar="N", help="seed of the tests' inputs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "task(id): the course task that a test belongs to")
    from minivllm.course.binding import check_impl

    try:
        check_impl(config.getoption("--impl"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    hidden = config.getoption("--hidden")
    if hidden:
        if not Path(hidden).is_dir():
            raise pytest.UsageError(f"--hidden {hidden!r} is not a folder")
        config.args.append(str(Path(hidden).resolve()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start a grading when there is something to grade; add the engine's checks."""
    wanted = config.getoption("--task")
    if wanted:
        wanted = _task_ids(wanted, items)
        left_out = [item for item in items if task_of(item) not in wanted]
        items[:] = [item for item in items if task_of(item) in wanted]
        config.hook.pytest_deselected(items=left_out)
    graded = [item for item in items if task_of(item)]
    if not graded:
        return
    from minivllm.course.grading import Grading
    from minivllm.course.table import load_course

    visible = {_chapter(item) for item in graded if not is_hidden(item)}
    for item in [i for i in graded if is_hidden(i) and _chapter(i) not in visible]:
        items.remove(item)
    course = load_course(find_root(Path(graded[0].path).parent))
    seed = config.getoption("--course-seed")
    config.stash[GRADING] = Grading(
        course,
        impl=config.getoption("--impl"),
        chain=config.getoption("--chain"),
        seed=course.seed if seed is None else seed,
        threads=config.getoption("--course-threads"),
        selected=_selected(config, course.tasks, graded, visible),
        narrowed=_narrowed(config),
    )
    if config.getoption("--engine"):
        from minivllm.course.engine_items import engine_items

        model = config.getoption("--engine-model")
        items += engine_items(graded[0].session, config.stash[GRADING], model)


def _task_ids(names: list[str], items: list[pytest.Item]) -> set[str]:
    """The tasks that --task names, by themselves or by their chapter."""
    from minivllm.course.table import load_course

    start = next((Path(item.path).parent for item in items if task_of(item)), None)
    try:
        course = load_course(find_root(start))
        return {task.id for name in names for task in course.select(name)}
    except (ValueError, FileNotFoundError) as error:
        raise pytest.UsageError(f"--task: {error}") from error


def _selected(config: pytest.Config, tasks: Any, graded: list[Any], visible: set[str]) -> list[str]:
    """Tasks to report: those with a test, and where whole files run, those that lack one."""
    wanted = {task_of(item) for item in graded if _chapter(item) in visible}
    if not _narrowed(config) and not config.getoption("--task"):
        wanted |= {task.id for task in tasks if task.chapter in visible}
    return [task.id for task in tasks if task.id in wanted]


def _narrowed(config: pytest.Config) -> bool:
    """Whether single tests were picked, so that a task may lack some of its tests."""
    return any("::" in arg for arg in config.args) or bool(config.option.keyword)


def task_of(item: pytest.Item) -> str:
    """The task's id, or "" for a test that is no part of the course."""
    mark = item.get_closest_marker("task")
    return str(mark.args[0]) if mark else ""


def is_hidden(item: pytest.Item | pytest.Collector) -> bool:
    """Whether the test (or file of tests) comes from the --hidden folder."""
    hidden = item.config.getoption("--hidden")
    return bool(hidden) and Path(hidden).resolve() in Path(item.path).parents


def _chapter(item: pytest.Item) -> str:
    return task_of(item).partition(".")[0]


@pytest.fixture
def check(request: pytest.FixtureRequest) -> Check:
    """What a course test asks of the unit that its `task` mark names."""
    grading = request.config.stash[GRADING]
    what = (request.node.function.__doc__ or "").strip()
    return grading.check_for(task_of(request.node), what)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A course test ends, whatever the answer does."""
    if item.config.stash.get(GRADING, None) is None or not task_of(item):
        return (yield)
    from minivllm.course.time_limit import time_limit

    with time_limit():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a course test's outcome into a result state, with one line in place of a traceback."""
    report = yield
    grading = item.config.stash.get(GRADING, None)
    if grading is None or not task_of(item) or report.when == "teardown":
        return report
    result = _result(grading, item, call, report)
    if result is None:
        return report
    grading.tests.append(result)
    if result.state == UNAVAILABLE:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, result.text)
    elif result.state != PASS:
        report.outcome = "failed"
        label = WORDS.get(result.state, result.state)
        text = grading.with_closing(result)
        report.longrepr = f"{result.task} {label}: {text}"
    report.course_state = result.state  # type: ignore[attr-defined]
    return report


def _result(
    grading: Grading, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> TestResult | None:
    """None while the test has not ended (a setup that went well)."""
    name = item.name.removeprefix("test_")
    if call.excinfo is None:
        return TestResult(task_of(item), name, PASS) if report.when == "call" else None
    error = call.excinfo.value
    if isinstance(error, Failed):
        return grading.failed(task_of(item), name, error, is_hidden(item))
    if report.skipped:
        return TestResult(task_of(item), name, UNAVAILABLE, "skipped", str(error))
    if report.when == "setup":
        return None  # a fault of the course or its options: pytest shows it as an error
    # The test itself broke on what the unit gave it, outside any check.
    text = f"raised {type(error).__name__}: {error}"
    return grading.failed(task_of(item), name, Failed(WRONG, "raised", text), is_hidden(item))


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Own categories keep course results out of pytest's FAILURES section, not out of its count."""
    state = getattr(report, "course_state", None)
    if state is None:
        return None
    return WORDS.get(state, state), LETTERS.get(state, "F"), WORDS.get(state, state).upper()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Which files are graded, with their hashes."""
    grading = config.stash.get(GRADING, None)
    if grading is None:
        return []
    chapters = list(dict.fromkeys(t.partition(".")[0] for t in grading.selected))
    others = grading.impl if grading.chain else "the reference"
    head = f"course {grading.course.version}: grading {grading.impl}, "
    head += f"earlier chapters from {others}, seed {grading.seed}"
    lines = [head]
    if grading.chain:
        if config.getoption("--engine"):
            lines += _stand_ins(grading, max(chapters))
        chapters = [c.id for c in grading.course.chapters if c.id <= max(chapters)]
    return [*lines, *(f"  {mark.path} ({mark.digest})" for mark in grading.files(chapters))]


def _stand_ins(grading: Grading, chapter: str) -> list[str]:
    """The earlier units that the engine has to run without, a line a chapter."""
    undone: dict[str, list[str]] = {}
    for task in grading.done_before(chapter)[1]:
        undone.setdefault(task.chapter, []).append(task.id)
    return [
        f"  {chapter} is not done ({', '.join(ids)}): in the engine the reference stands in"
        for chapter, ids in undone.items()
    ]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line a task, points, the next task."""
    grading = config.stash.get(GRADING, None)
    if grading is None:
        return
    from minivllm.course.report import terminal_lines

    terminalreporter.section("minivllm course")
    for line in [*terminal_lines(grading.course, grading.results()), *grading.engine_lines]:
        terminalreporter.line(line)
    if grading.narrowed:
        terminalreporter.line("only the tests you picked: run the whole file for the points")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the JSON; a selected task for which no test ran makes the run fail."""
    config = session.config
    grading = config.stash.get(GRADING, None)
    if grading is None or config.option.collectonly:
        return
    from minivllm.course import report
    from minivllm.course.results import MISSING

    results = grading.results()
    if any(result.state == MISSING for result in results) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    target = config.getoption("--grade-json")
    if target:
        chapters = list(dict.fromkeys(r.id.partition(".")[0] for r in results))
        record = report.progress(
            grading.course, grading.impl, grading.seed, grading.files(chapters), results
        )
        report.write_json(Path(target), report.gradescope(results), record)
