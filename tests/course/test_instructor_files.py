"""The set-ups that the instructor guide describes, run as far as they go without a network."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from course_tools import make_course
from grader_tools import ROOT
from minivllm.course.runner import child_environment

INSTRUCTORS = ROOT / "lessons" / "instructors"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="course grade needs Linux")
def test_run_autograder_writes_gradescopes_results(tmp_path):
    source = tmp_path / "source" / "course"
    source.mkdir(parents=True)
    make_course(source)
    submission = tmp_path / "submission"
    submission.mkdir()
    shutil.copyfile(source / "solutions" / "ch01_scale.py", submission / "ch01_scale.py")
    environment = {
        **child_environment(),
        "AUTOGRADER": str(tmp_path),
        "PYTHON": sys.executable,
        "GRADE_OPTIONS": "--chapters ch01 ch02",
    }
    environment["PYTHONPATH"] += f"{os.pathsep}{source}"
    script = INSTRUCTORS / "run_autograder"
    assert os.access(script, os.X_OK)
    done = subprocess.run([script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    grades = json.loads((tmp_path / "results" / "results.json").read_text())
    assert grades["score"] == 1 and grades["max_score"] == 6


@pytest.mark.parametrize("name", ["setup.sh", "run_autograder"])
def test_scripts_parse(name):
    assert subprocess.run(["bash", "-n", INSTRUCTORS / name]).returncode == 0


def test_the_classroom_summary_is_valid_code():
    """The workflow's inline Python, on a progress file as the plugin writes it."""
    text = (INSTRUCTORS / "classroom.yml").read_text()
    code = text.partition("<<'PY'\n")[2].partition("          PY\n")[0]
    lines = [line[10:] for line in code.splitlines()]
    task = {"id": "ch02.1", "name": "rms_norm", "label": "todo", "earned": 0, "points": 2}
    progress = {"points": 0, "offered": 2, "next": "ch02.1", "tasks": [task]}
    printed = []
    source = "\n".join(lines).replace("import json\n", "")
    source = source.replace('json.load(open("out/progress.json"))', "progress")
    exec(source, {"progress": progress, "print": printed.append})
    assert printed[0].startswith("**0 of 2 points**")
    assert "| ch02.1 rms_norm | todo | 0/2 |" in printed
