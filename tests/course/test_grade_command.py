"""`course grade` as a command: wrong hidden tests stop it, a bar on a terminal, short reports."""

import os
import struct
import subprocess
import sys

import pytest

from course_tools import make_course
from minivllm.course.runner import child_environment

if not sys.platform.startswith("linux"):
    pytest.skip("course grade needs fork and resource limits", allow_module_level=True)

import fcntl
import pty
import termios

from minivllm.course.folder_grading.children import Job
from minivllm.course.folder_grading.hidden import _find_faults
from minivllm.course.folder_grading.reports import StudentGrade, feedback, summary_lines

HEAD = 'import pytest, torch\n@pytest.mark.task("ch01.1")\n'
RIGHT = f"{HEAD}def test_two(check): check.close(torch.ones(1) * 2, torch.ones(1), 2.0)\n"
TYPO = RIGHT.replace("check.close", "check.clse")


def grade(course, folder, *options, stderr=subprocess.PIPE):
    environment = {**child_environment(), "MINIVLLM_COURSE": str(course.root)}
    environment["PYTHONPATH"] += f"{os.pathsep}{course.root}"
    command = [sys.executable, "-m", "minivllm.course", "grade", str(folder), *map(str, options)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    )


def submissions(course, *students):
    for student in students:
        folder = course.root / "subs" / student
        folder.mkdir(parents=True)
        source = course.root / "solutions" / "ch01_scale.py"
        (folder / "ch01_scale.py").write_text(source.read_text())
    return course.root / "subs"


def hidden(course, text, name="test_ch01_more.py"):
    folder = course.root / "hidden"
    folder.mkdir()
    (folder / name).write_text(text)
    return folder


def test_a_wrong_hidden_test_stops_all_before_anybody_is_graded(tmp_path):
    course = make_course(tmp_path)
    subs, out = submissions(course, "ann", "bo"), tmp_path / "all.json"
    done = grade(course, subs, "--hidden", hidden(course, TYPO), "--json", out)
    assert done.returncode == 2 and done.stdout == "" and not out.exists()
    (line,) = done.stderr.splitlines()
    assert "test_ch01_more.py::test_two fails on the reference" in line
    assert "AttributeError: 'Check' object has no attribute 'clse'" in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, ""),
        (RIGHT.replace("check", "chek"), "::test_two fails on the reference: fixture 'chek' not"),
        (RIGHT.replace("* 2,", "* 3,"), "::test_two fails on the reference: 2 at [0], expected 3"),
        (RIGHT.replace("check)", "check"), "test_ch01_more.py does not load: SyntaxError: "),
        (f"import nowhere\n{RIGHT}", "does not load: ModuleNotFoundError: No module named 'now"),
        (RIGHT.replace("ch01.1", "ch01.7"), "::test_two: its task mark (ch01.7) names no task"),
        ("def test_bare(): pass\n", "::test_bare: its task mark (none) names no task"),
        ("x = 1\n", "the folder holds none"),
    ],
)
def test_what_is_wrong_with_a_hidden_test_is_said_in_a_line(tmp_path, text, expected):
    course = make_course(tmp_path)
    for name in [name for name in sys.modules if ".test_ch0" in f".{name}"]:
        del sys.modules[name]  # pytest keeps modules by name
    chapter = course.chapter("ch01")
    job = Job(course, "reference", chapter, hidden(course, text))
    found = [fault["text"] for fault in _find_faults(job)]
    assert len(found) == bool(expected) and expected in "".join(found)


def test_a_hidden_test_that_ends_the_program_is_at_fault_too(tmp_path):
    course = make_course(tmp_path)
    text = f"{HEAD}def test_exit(check):\n    import os\n    os._exit(3)\n"
    done = grade(course, submissions(course, "ann"), "--hidden", hidden(course, text))
    assert done.returncode == 2 and "ch01: no result: the program ended itself" in done.stderr


def test_a_bar_counts_submissions_on_a_terminal_only(tmp_path):
    course = make_course(tmp_path)
    subs = submissions(course, "ann", "bo")
    # It runs again task by task, and is one submission all the same.
    (subs / "bo" / "ch02_counter.py").write_text("while True:\n    pass\n")
    (subs / "empty").mkdir()
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = grade(course, subs, "--seconds", "2", "--jobs", "2", stderr=terminal)
    os.close(terminal)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "0/3 [" in shown and "3/3 [" in shown and "4/3" not in shown
    assert done.returncode == 0 and "3 submissions" in done.stdout
    assert "submission/s" not in done.stdout
    piped = grade(course, subs, "--chapters", "ch01")
    assert piped.stderr == "" and "3 submissions" in piped.stdout


def task(task_id, label, text="", points=2):
    state = "pass" if label == "pass" else "wrong"
    entry = {"id": task_id, "name": f"unit{task_id}", "state": state, "label": label}
    return {**entry, "points": points, "earned": points if state == "pass" else 0, "text": text}


def test_a_chapter_whose_tasks_say_the_same_says_it_once(tmp_path):
    course = make_course(tmp_path)
    gone = "ch01_scale.py was not sent"
    tasks = (
        *(task(f"ch01.{n}", "missing file", gone) for n in (1, 2, 3)),
        *(task(f"ch02.{n}", "todo", "not written yet") for n in (1, 2)),
        *(task("ch03.1", "pass"), task("ch03.2", "todo", "not written yet")),
        *(task("ch04.1", "pass"), task("ch04.2", "pass")),
    )
    grade = StudentGrade("ann", tasks, ("ch01_scale.py",), (), 0.0)
    line = summary_lines(course, [grade])[1]
    assert line.split("  ")[-1] == "missing file: ch01; todo: ch02, ch03.2"
    text = feedback(course, grade)
    assert text.count(gone) == 1 and text.count("ch01_scale.py") == 1
    assert "ch01  all tasks: missing file, 0/6\n" in text and "ch02  all tasks: todo, 0/4\n" in text
    assert "ch03.2  unitch03.2: todo, 0/2\n" in text
    # What was earned is told task by task.
    assert "ch04.1  unitch04.1: pass, 2/2\nch04.2  unitch04.2: pass, 2/2\n" in text


def test_an_empty_folder_is_a_short_line(tmp_path):
    course = make_course(tmp_path)
    subs = submissions(course, "ann")
    (subs / "empty").mkdir()
    lines = grade(course, subs).stdout.splitlines()
    assert lines[2].split() == "empty 0/10 missing file: ch01.1, ch02, ch03.1".split()


def test_a_chapter_that_is_not_due_is_no_news(tmp_path):
    course = make_course(tmp_path)
    subs = submissions(course, "ann")
    (subs / "ann" / "ch02_counter.py").write_text("later = 1\n")
    (subs / "ann" / "ch77_mine.py").write_text("x = 1\n")
    line = grade(course, subs, "--chapters", "ch01").stdout.splitlines()[1]
    assert line.endswith("not used: ch77_mine.py")
