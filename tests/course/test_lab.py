"""`course lab`: copies that are never overwritten, the server's command line, no news question."""

import json
import os
import sys

import nbformat
import pytest

import minivllm.course.lab as lab
from grader_tools import COURSE, ROOT
from lab_browser import faults
from minivllm.course.lessons import lesson_paths
from minivllm.course.table import load_course

LESSON = "02_rmsnorm.ipynb"


@pytest.fixture
def course(tmp_path):
    """A classroom's layout: only exercises/ and lessons/, no package beside them."""
    for folder in ("exercises", "lessons"):
        (tmp_path / folder).mkdir()
    (tmp_path / "exercises" / "course.toml").write_bytes(
        (ROOT / "exercises" / "course.toml").read_bytes()
    )
    (tmp_path / "lessons" / LESSON).write_bytes((ROOT / "lessons" / LESSON).read_bytes())
    (tmp_path / "lessons" / "notes.ipynb").write_text("no lesson")
    return load_course(tmp_path)


@pytest.fixture
def started(monkeypatch):
    """The servers that would have been started."""
    commands = []
    monkeypatch.setattr(lab, "_run", lambda command, folder: commands.append(command) or 0)
    monkeypatch.setattr(lab, "find_spec", lambda name: object())
    for name in ("JUPYTER_SERVER_URL", "BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    return commands


def test_copies_once_and_never_again(course):
    assert lab.copy_lessons(course) == [f"copied work/{LESSON}"]
    copy = course.root / "work" / LESSON
    copy.write_text("mine")
    assert lab.copy_lessons(course) == [f"kept your work/{LESSON}"]
    assert copy.read_text() == "mine"
    assert sorted(path.name for path in copy.parent.iterdir()) == [LESSON]


@pytest.mark.parametrize("path", lesson_paths(COURSE), ids=lambda path: path.stem)
def test_a_copy_has_no_outputs_and_is_else_the_lesson(path):
    text = path.read_text(encoding="utf-8")
    copy, lesson = (nbformat.reads(t, 4) for t in (lab.without_outputs(text), text))
    nbformat.validate(copy)
    code = [cell for cell in copy.cells if cell.cell_type == "code"]
    assert code and all(not cell.outputs and cell.execution_count is None for cell in code)
    for cell in lesson.cells:
        if cell.cell_type == "code":
            assert cell.execution_count  # the lesson itself keeps what it shows
            cell.outputs, cell.execution_count = [], None
    assert copy == lesson
    assert lab.without_outputs(text) == nbformat.writes(lesson) + "\n"


def test_what_is_copied_has_no_outputs(course):
    committed = (course.root / "lessons" / LESSON).read_bytes()
    lab.copy_lessons(course)
    copy = json.loads((course.root / "work" / LESSON).read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") for cell in copy["cells"])
    assert (course.root / "lessons" / LESSON).read_bytes() == committed


def test_a_copy_of_a_read_only_lesson_can_be_written(course):
    (course.root / "lessons" / LESSON).chmod(0o444)
    lab.copy_lessons(course)
    assert os.stat(course.root / "work" / LESSON).st_mode & 0o200


def test_a_folder_that_cannot_be_written_is_one_line(course):
    (course.root / "work").write_text("a file in the way")
    with pytest.raises(ValueError, match=r"cannot write .*work .*a folder of your own"):
        lab.copy_lessons(course)


def test_only_copying(course, started, capsys):
    assert lab.open_lab(course, launch=False) == 0
    assert started == [] and "copied" in capsys.readouterr().out


def test_the_server_sees_the_exercises_and_starts_in_work(course, started):
    assert lab.open_lab(course, browser=False, port=8901) == 0
    (command,) = started
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={course.root}" in command
    assert "--LabApp.default_url=/lab/tree/work" in command
    assert "--no-browser" in command and "--ServerApp.port=8901" in command


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a screen is looked for on Linux")
def test_without_a_browser_the_command_is_printed(course, started, capsys):
    assert lab.open_lab(course) == 0
    assert started == []
    assert "minivllm course lab --no-browser --port 8888" in capsys.readouterr().out
    # With a browser named by the user, the server starts and opens it.
    os.environ["BROWSER"] = "firefox"
    try:
        assert lab.open_lab(course) == 0
    finally:
        del os.environ["BROWSER"]
    assert len(started) == 1 and "--no-browser" not in started[0]


def test_inside_a_jupyter_server_no_second_one_is_started(course, started, monkeypatch, capsys):
    monkeypatch.setenv("JUPYTER_SERVER_URL", "http://localhost:8888/")
    assert lab.open_lab(course) == 0
    assert started == [] and "file browser" in capsys.readouterr().out


def test_without_jupyterlab_the_command_that_installs_it(course, started, monkeypatch):
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[lessons\]'"):
        lab.open_lab(course)


def test_the_environment_turns_the_news_off_and_keeps_the_users_paths(monkeypatch):
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/somebody/else")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = lab.lab_environment()
    first, second = environment["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    assert second == "/somebody/else" and environment["OMP_NUM_THREADS"] == "1"
    settings = lab.SETTINGS / "labconfig" / "default_setting_overrides.json"
    assert first == str(lab.SETTINGS)
    notification = json.loads(settings.read_text())["@jupyterlab/apputils-extension:notification"]
    assert notification == {"fetchNews": "false", "checkForUpdates": False}


def cell(count, *outputs):
    return {"cell_type": "code", "execution_count": count, "outputs": list(outputs)}


FIGURE = {"output_type": "display_data", "data": {"image/png": "...", "text/plain": "<Figure>"}}
ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no"}


def test_the_browsers_judge():
    """What `make browser` demands of the saved notebook."""
    committed = {"cells": [{"cell_type": "markdown"}, cell(1), cell(2, FIGURE)]}
    assert faults(committed, committed) == []
    assert faults({"cells": [cell(1), cell(2)]}, committed) == [
        "code cell 2 lacks the outputs ['image/png', 'text/plain']"
    ]
    assert faults({"cells": [cell(1), cell(None, FIGURE)]}, committed) == [
        "code cell 2 has the count None"
    ]
    assert faults({"cells": [cell(1, ERROR), cell(2, FIGURE)]}, committed) == [
        "code cell 1: ValueError: no"
    ]
    assert faults({"cells": [cell(1)]}, committed) == [
        "the saved notebook has another number of code cells"
    ]
