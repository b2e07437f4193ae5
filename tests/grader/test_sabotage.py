"""Group 1, the other half: files that try, or happen, to break the grader get nothing."""

import csv
import json
import subprocess
import sys

import pytest

from grader_tools import EATER, ENDLESS, copy_course, replace_gaps, sabotage, stub_text
from minivllm.course.runner import child_environment

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="course grade needs fork and resource limits"
)
CONFTEST = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.obj = lambda: None
def pytest_sessionfinish(session):
    session.exitstatus = 0
"""


def grade(course, folder, *options, chapters=()):
    """Run `course grade` as a command; the parsed JSON and CSV."""
    out = folder.parent / "out"
    command = [sys.executable, "-m", "minivllm.course", "grade", str(folder)]
    command += ["--json", f"{out}/all.json", "--csv", f"{out}/all.csv"]
    command += ["--feedback", f"{out}/feedback", "--jobs", "2", *options]
    command += ["--chapters", *chapters] if chapters else []
    environment = {**child_environment(), "MINIVLLM_COURSE": str(course.root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((out / "all.json").read_text())
    with open(out / "all.csv", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    students = {student["student"]: student for student in report["students"]}
    assert {name: str(s["points"]) for name, s in students.items()} == {
        name: row["points"] for name, row in rows.items()
    }
    return students, out


def write(folder, student, chapter, text):
    path = folder / student / chapter.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_sabotage_scores_nothing_and_hurts_nobody(tmp_path):
    course = copy_course(tmp_path / "course")
    subs = tmp_path / "subs"
    for chapter in course.chapters:
        solution = (course.root / "solutions" / chapter.file).read_text()
        for name in ("a_good", "z_good"):  # before and after all the others
            write(subs, name, chapter, solution)
        for kind, text in sabotage(course, chapter).items():
            write(subs, kind, chapter, text)
        write(subs, "own_conftest", chapter, stub_text(course, chapter))
    (subs / "own_conftest" / "conftest.py").write_text(CONFTEST)
    students, _ = grade(course, subs, "--seconds", "60")
    for name in ("a_good", "z_good"):
        assert students[name]["points"] == students[name]["offered"] > 0
    for name, student in students.items():
        if not name.endswith("_good"):
            earned = {t["id"]: t["text"] for t in student["tasks"] if t["earned"]}
            assert student["points"] == 0, f"{name} earned {earned}"
    labels = {name: {t["label"] for t in s["tasks"]} for name, s in students.items()}
    assert labels["syntax_error"] == {"broken file"} and labels["stub"] == {"todo"}
    assert labels["hidden_exit"] == {"no result"}
    assert "conftest.py" in students["own_conftest"]["extra"]


def test_endless_loops_and_memory_eaters_end(tmp_path):
    """Each within its limits; where only one task loops, the others keep their points."""
    course = copy_course(tmp_path / "course")
    chapter = course.chapter("ch02")
    stub = stub_text(course, chapter)
    subs = tmp_path / "subs"
    write(subs, "endless", chapter, replace_gaps(stub, ENDLESS))
    write(subs, "endless_import", chapter, f"{ENDLESS}\n")
    write(subs, "eater", chapter, replace_gaps(stub, EATER))
    write(subs, "good", chapter, (course.root / "solutions" / chapter.file).read_text())
    students, out = grade(course, subs, "--seconds", "8", chapters=[chapter.id])
    assert {n: s["points"] for n, s in students.items()} == {
        "endless": 0,
        "endless_import": 0,
        "eater": 0,
        "good": sum(task.points for task in chapter.tasks),
    }
    assert "endless loop?" in (out / "feedback" / "endless.txt").read_text()
    limit = 8 * (1 + len(chapter.tasks)) + 20
    assert all(student["seconds"] < limit for student in students.values())


def test_one_endless_task_costs_its_own_points_only(tmp_path):
    course = copy_course(tmp_path / "course")
    chapter = course.chapter("ch02")
    solution = (course.root / "solutions" / chapter.file).read_text()
    text = solution.replace("    residual = x + residual\n", "    while True: pass\n")
    assert text != solution
    write(tmp_path / "subs", "half", chapter, text)
    students, out = grade(course, tmp_path / "subs", "--seconds", "8", chapters=["ch02"])
    assert [t["earned"] for t in students["half"]["tasks"]] == [2, 0]
    assert "no result within 8 s" in (out / "feedback" / "half.txt").read_text()
