"""`course grade`: the layouts that submissions come in, and the reports that go out.

Sabotage and limits are tested in tests/grader/test_sabotage.py.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from course_tools import make_course
from minivllm.course.commands import main
from minivllm.course.folder_grading import grade_folder
from minivllm.course.runner import child_environment

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="course grade needs fork and resource limits"
)
if sys.platform.startswith("linux"):
    from minivllm.course.folder_grading.children import _read_result
    from minivllm.course.folder_grading.submissions import find_submissions

RIGHT = "def scale(x, factor):\n    return x * factor\n"
MOODLE = "Ann Lee_4711_assignsubmission_file_"


def find(course, source, tmp_path, single=False):
    target = tmp_path / "target"
    shutil.rmtree(target, ignore_errors=True)
    found = find_submissions(source, course.chapters, target, single)
    return {s.student: s for s in found}


def put(path, text=RIGHT):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_plain_folders(tmp_path):
    course = make_course(tmp_path)
    subs = tmp_path / "subs"
    put(subs / "ann" / "ch01_scale.py")
    put(subs / "bob" / "deep" / "er" / "ch01_scale.py")
    put(subs / "bob" / "conftest.py", "raise SystemExit")
    put(subs / "bob" / "ch09_other.py")
    put(subs / "bob" / "notes.txt")
    (subs / "cy").mkdir()
    found = find(course, subs, tmp_path)
    assert set(found) == {"ann", "bob", "cy"}
    assert found["ann"].files["ch01"].read_text() == RIGHT and found["ann"].extra == []
    assert found["bob"].files["ch01"].is_file()
    assert sorted(found["bob"].extra) == ["ch09_other.py", "conftest.py"]
    assert found["cy"].missing == ["ch01_scale.py", "ch02_counter.py", "ch03_drain.py"]


def test_classroom_clones_take_exercises_not_solutions(tmp_path):
    course = make_course(tmp_path)
    clone = tmp_path / "subs" / "course-ann"
    put(clone / "solutions" / "ch01_scale.py", "no")
    put(clone / "exercises" / "ch01_scale.py")
    put(clone / ".git" / "ch01_scale.py", "no")
    put(clone / "tests" / "conftest.py")
    found = find(course, tmp_path / "subs", tmp_path)
    assert found["course-ann"].files["ch01"].read_text() == RIGHT


def test_gradescope_export_has_names(tmp_path):
    course = make_course(tmp_path)
    subs = tmp_path / "subs"
    put(subs / "submission_12" / "ch01_scale.py")
    put(subs / "submission_13" / "ch01_scale.py")
    put(
        subs / "submission_metadata.yml",
        "submission_12:\n  :submitters:\n  - :name: Ann Lee\n    :sid: '1'\n"
        'submission_13:\n  :submitters:\n  - :name: "Bo"\n',
    )
    assert set(find(course, subs, tmp_path)) == {"Ann Lee (submission_12)", "Bo (submission_13)"}


def test_moodle_zip_in_three_forms(tmp_path):
    course = make_course(tmp_path)
    inner = tmp_path / "inner.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("work/ch01_scale.py", RIGHT)
    moodle = tmp_path / "moodle.zip"
    with zipfile.ZipFile(moodle, "w") as archive:
        archive.writestr(f"{MOODLE}/ch01_scale.py", RIGHT)
        archive.writestr("Bo_5_assignsubmission_file_ch01_scale.py", RIGHT)
        archive.write(inner, "Cy_6_assignsubmission_file_/mine.zip")
        archive.writestr("../../evil/ch01_scale.py", "evil")
    found = find(course, moodle, tmp_path)
    assert {"Ann Lee", "Bo", "Cy"} <= set(found)
    for name in ("Ann Lee", "Bo", "Cy"):
        assert found[name].files["ch01"].read_text() == RIGHT
    # Names in the archive decide no path of ours.
    assert not (tmp_path.parent / "evil").exists()
    for submission in found.values():
        for path in submission.files.values():
            assert tmp_path / "target" in path.parents
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(moodle) as archive:
        archive.extract(f"{MOODLE}/ch01_scale.py", unpacked)
    assert set(find(course, unpacked, tmp_path)) == {"Ann Lee"}


def test_links_and_huge_files_are_not_taken(tmp_path):
    course = make_course(tmp_path)
    secret = tmp_path / "secret.py"
    put(secret)
    put(tmp_path / "subs" / "ann" / "ch02_counter.py", "#" * 1_000_001)
    os.symlink(secret, tmp_path / "subs" / "ann" / "ch01_scale.py")
    found = find(course, tmp_path / "subs", tmp_path)["ann"]
    assert found.files == {} and len(found.missing) == 3


def test_nothing_to_grade_is_said(tmp_path):
    course = make_course(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no submissions"):
        find(course, tmp_path / "empty", tmp_path)
    with pytest.raises(ValueError, match="there is no"):
        find(course, tmp_path / "nowhere", tmp_path)
    put(tmp_path / "text.zip", "no zip")
    with pytest.raises(ValueError, match="neither a folder nor a zip"):
        find(course, tmp_path / "text.zip", tmp_path)


def test_other_systems_are_refused_with_the_reason(tmp_path, monkeypatch):
    course = make_course(tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"needs Linux.*darwin"):
        grade_folder(course, argparse.Namespace())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"tasks": []}', b'{"key": "other", "tasks": []}', b'[1]\n{"key": "k"}', b"\xff"],
)
def test_only_one_message_with_the_key_counts(data):
    assert _read_result(data, "k") is None
    assert _read_result(b'{"key": "k", "tasks": []}', "k") == []


def command(course, *options):
    environment = {**child_environment(), "MINIVLLM_COURSE": str(course.root), "SECRET": "x"}
    environment["PYTHONPATH"] += f"{os.pathsep}{course.root}"
    done = subprocess.run(
        [sys.executable, "-m", "minivllm.course", "grade", *map(str, options)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LOOK_AROUND = """
import torch
def scale(x, factor):
    os = vars(print.__self__)["__imp" + "ort__"]("os")
    print("FOUND", sorted(os.environ), os.getcwd(), sorted(os.listdir(".")))
    return x * factor
"""


def test_one_command_writes_all_reports(tmp_path):
    course = make_course(tmp_path)
    subs, out = tmp_path / "subs", tmp_path / "out"
    put(subs / "=ann" / "ch01_scale.py")
    put(subs / "bo b" / "ch01_scale.py", "def scale(x, factor):\n    return x + factor\n")
    put(subs / "bo_b" / "ch01_scale.py", LOOK_AROUND)
    for file in (course.root / "solutions").iterdir():
        shutil.copyfile(file, subs / "bo_b" / file.name) if "01" not in file.name else None
    hidden = tmp_path / "hidden"
    put(
        hidden / "test_ch01_more.py",
        'import pytest, torch\n@pytest.mark.task("ch01.1")\ndef test_more(check):\n'
        '    """secret"""\n    check.close(torch.zeros(1), torch.ones(1), 0.0)\n',
    )
    before = sorted(path.name for path in (course.root / "exercises").rglob("*"))
    options = ["--json", out / "all.json", "--csv", out / "all.csv", "--feedback", out / "fb"]
    text = command(course, subs, *options, "--hidden", hidden, "--jobs", "2")
    assert "course 0.0.1, seed 7, 3 submissions" in text
    report = json.loads((out / "all.json").read_text())
    points = {s["student"]: s["points"] for s in report["students"]}
    assert points == {"=ann": 1, "bo b": 0, "bo_b": 10} and report["seed"] == 7
    rows = (out / "all.csv").read_text().splitlines()
    assert rows[0] == "student,points,offered,ch01.1,ch02.1,ch02.2,ch03.1,missing,not used"
    assert rows[1].startswith("'=ann,1,10,1,0,0,0,ch02_counter.py ch03_drain.py")
    # Two names that become one file name are both kept.
    assert {p.name for p in (out / "fb").iterdir()} == {"ann.txt", "bo_b.txt", "bo_b-2.txt"}
    feedback = (out / "fb" / "bo_b.txt").read_text()
    assert "bo b: 0 of 10 points" in feedback and "ch01.1  scale: wrong, 0/1" in feedback
    assert "ch02_counter.py was not sent" in (out / "fb" / "ann.txt").read_text()
    assert "secret" not in feedback
    assert sorted(path.name for path in (course.root / "exercises").rglob("*")) == before


def test_single_submission_for_gradescope(tmp_path):
    course = make_course(tmp_path)
    submission = tmp_path / "submission"
    put(submission / "exercises" / "ch01_scale.py")
    results = tmp_path / "results" / "results.json"
    command(course, submission, "--gradescope", results)
    grades = json.loads(results.read_text())
    assert grades["score"] == 1 and grades["max_score"] == 10
    assert [t["score"] for t in grades["tests"]] == [1, 0, 0, 0]
    assert grades["tests"][1]["output"].startswith("missing file")
    for entry in grades["tests"]:
        assert set(entry) >= {"name", "score", "max_score", "output", "visibility"}


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--jobs", "-1"], ["--chapters"]])
def test_limits_that_grade_nothing_are_refused(flags, capsys):
    """`--seconds 0` would give everybody nothing, without a word."""
    with pytest.raises(SystemExit) as stopped:
        main(["grade", "folder", *flags])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "must be above 0" in error or "expected at least one argument" in error
