"""`course release`: what students get, what they do not, and that it works on its own."""

import os
import re
import subprocess
import sys

import pytest

from grader_tools import COURSE, ROOT
from minivllm.course.commands import main
from minivllm.course.cut import cut_chapter
from minivllm.course.release import MARK, release, student_text
from minivllm.course.runner import child_environment
from minivllm.course.stubs import is_edited
from minivllm.course.table import load_course


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """One released tree; tests only look at it or run it."""
    folder = tmp_path_factory.mktemp("release") / "student"
    lines = release(COURSE, folder)
    assert f"{len(COURSE.chapters)} chapters" in lines[0]
    return folder


def run(tree, *command):
    environment = {**child_environment(), "PYTHONPATH": str(tree)}
    environment.pop("MINIVLLM_COURSE", None)
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True
    )


def test_has_what_a_student_needs(tree):
    names = ["README.md", "AGENTS.md", "LICENSE", "Makefile", "pyproject.toml", ".gitignore"]
    names += ["constraints/cpu.txt", "exercises/README.md", "exercises/hints.toml"]
    names += ["minivllm/tiny/model/config.json", "minivllm/course/data/stubs", "tests/conftest.py"]
    names += [f"exercises/{chapter.test_file}" for chapter in COURSE.chapters]
    names += [f"minivllm/course/mistakes/{chapter.id}.py" for chapter in COURSE.chapters]
    lessons = [path.name for path in (ROOT / "lessons").glob("[0-9][0-9]_*.ipynb")]
    names += [f"lessons/{name}" for name in lessons]
    assert [name for name in names if not (tree / name).exists()] == []


def test_has_no_answers(tree):
    for name in ("solutions", "tests/grader", "tests/course", "lessons/INSTRUCTORS.md"):
        assert not (tree / name).exists()
    for name in ("lessons/instructors", "LOG.md", ".ci", "work", ".git", "results"):
        assert not (tree / name).exists()
    names = [path.name for path in tree.rglob("*")]
    assert not [name for name in names if name.endswith((".pyc", ".bak")) or "answers.md" in name]
    # The answers to the lessons' questions stand nowhere: a phrase of them as a sample.
    readable = [path for path in tree.rglob("*") if path.suffix in (".md", ".ipynb", ".toml")]
    assert not [path for path in readable if "Third word edited" in path.read_text("utf-8")]


def test_stubs_are_fresh(tree):
    course = load_course(tree)
    for chapter in course.chapters:
        text = (tree / "exercises" / chapter.file).read_text(encoding="utf-8")
        assert text == cut_chapter(chapter, COURSE).stub
        assert not is_edited(course, chapter)


def test_texts_speak_of_nothing_that_was_left_out(tree):
    """Links lead somewhere, marks are gone, and no guide names the solutions as a folder."""
    for path in [*tree.glob("*.md"), *tree.glob("exercises/*.md"), *tree.glob("lessons/*.md")]:
        text = path.read_text(encoding="utf-8")
        assert "full tree only" not in text
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
    for name in ("README.md", "exercises/README.md"):
        text = (tree / name).read_text(encoding="utf-8")
        assert "solutions" not in text and "INSTRUCTORS" not in text
        assert "open-book" in text.lower() or "open book" in text.lower()


def test_ci_runs_the_exercises(tree):
    text = (tree / ".github" / "workflows" / "exercises.yml").read_text(encoding="utf-8")
    assert re.search(r"^\s+- run: pytest exercises/", text, re.MULTILINE)
    assert "course grade" not in text and re.search(r"^name: exercises$", text, re.MULTILINE)


def test_a_students_tree_offers_no_authors_commands(tree, monkeypatch, capsys):
    monkeypatch.chdir(tree)
    monkeypatch.delenv("MINIVLLM_COURSE", raising=False)
    assert load_course().edition == "student" and COURSE.edition == "full"
    for command in (["build"], ["kill-table"], ["grade", "."], ["release", "--student", "x"]):
        with pytest.raises(SystemExit, match="2"):
            main(command)
        said = capsys.readouterr().err
        # A slip of the keyboard lists what there is: nothing that cannot work here.
        assert f"invalid choice: '{command[0]}'" in said and "status" in said
        offered = said.partition("choose from")[2]
        assert not re.search(r"build|kill-table|readme|release|grade", offered), offered
    assert not (tree / "solutions").exists()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "(authors)" not in capsys.readouterr().out
    monkeypatch.chdir(COURSE.root)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "grade a folder" in capsys.readouterr().out


def test_works_alone(tree):
    """The released package, not the checkout's, runs the released exercises and hints."""
    where = run(tree, "-c", "import minivllm; print(minivllm.__file__)").stdout.strip()
    assert where == str(tree / "minivllm" / "__init__.py")
    first = COURSE.chapters[0]
    points = sum(task.points for task in first.tasks)
    done = run(tree, "-m", "pytest", f"exercises/{first.test_file}", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 1
    assert f"0/{points}, next: {first.tasks[0].id}" in done.stdout, done.stdout + done.stderr
    total = sum(task.points for task in COURSE.tasks)
    assert f"0/{total} points; next: " in run(tree, "-m", "minivllm.course", "status").stdout
    hint = run(tree, "-m", "minivllm.course", "hint", first.tasks[0].id)
    assert "hint 1 of 3" in hint.stdout


@pytest.mark.slow
def test_all_exercises_and_bare_pytest_collect(tree):
    done = run(tree, "-m", "pytest", "exercises/", "-q", "-p", "no:cacheprovider")
    total = sum(task.points for task in COURSE.tasks)
    assert done.returncode == 1 and f"0/{total}, next: " in done.stdout
    # Nothing that was left out is imported by a test that stayed.
    done = run(tree, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-2000:]


def test_never_overwrites(tmp_path):
    (tmp_path / "mine.txt").write_text("work")
    with pytest.raises(ValueError, match="is not empty"):
        release(COURSE, tmp_path)
    with pytest.raises(ValueError, match="is not empty"):
        release(COURSE, tmp_path / "mine.txt")
    with pytest.raises(ValueError, match="inside the checkout"):
        release(COURSE, ROOT / "minivllm" / "student")
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_folder_without_the_package_cannot_be_released(tree, tmp_path):
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "course.toml").write_bytes(
        (tree / "exercises" / "course.toml").read_bytes()
    )
    with pytest.raises(ValueError, match="holds no minivllm/"):
        release(load_course(tmp_path), tmp_path / "out")


def test_marked_parts_of_a_text():
    text = f"""one
| a row | {MARK}
<!-- full tree only: begin -->
two

<!-- full tree only: end -->

three
"""
    assert student_text(text) == "one\nthree\n"
    assert student_text("plain\n\ntext\n") == "plain\n\ntext\n"
