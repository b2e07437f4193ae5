"""Group 5: any order, one chapter alone, later chapters still stubs."""

import random
import subprocess
import sys

import pytest

from grader_tools import COURSE, copy_course
from minivllm.course.runner import child_environment, run_tests


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    return copy_course(tmp_path_factory.mktemp("course"))


def pytest_ids(course):
    """Node ids of all visible tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "exercises"]
    command += ["-p", "minivllm.course.pytest_plugin", "--rootdir", "."]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=course.root, env=child_environment()
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_random_order(fresh):
    """Also the time limit of all CPU tests: 90 s on two cores, far more than they need."""
    ids = pytest_ids(fresh)
    assert len(ids) > len(fresh.tasks)
    random.Random(5).shuffle(ids)
    command = [sys.executable, "-m", "pytest", "-q", *ids, "--impl", "solutions"]
    command += ["-p", "minivllm.course.pytest_plugin", "--rootdir", "."]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=fresh.root,
        env=child_environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all done" in done.stdout


def test_one_chapter_alone_while_the_others_are_stubs(fresh):
    chapter = COURSE.chapters[-1]
    solution = (fresh.root / "solutions" / chapter.file).read_text()
    path = fresh.root / "exercises" / chapter.file
    stub = path.read_text()
    path.write_text(solution)
    try:
        run = run_tests(fresh, [chapter.id])
    finally:
        path.write_text(stub)
    assert run.returncode == 0, run.output
    assert run.progress["points"] == run.progress["offered"]
