"""course.toml: read, checked, refused by name."""

import pytest

from course_tools import TABLE, make_course
from minivllm.course.hints import load_hints, next_hint
from minivllm.course.table import load_course


def test_fake_course(tmp_path):
    course = make_course(tmp_path)
    assert [task.id for task in course.tasks] == ["ch01.1", "ch02.1", "ch02.2", "ch03.1"]
    chapter = course.chapter("2")
    assert chapter.file == "ch02_counter.py" and chapter.names == ("Counter",)
    assert course.task("ch02.2").name == "Counter"
    assert course.chapter("ch02_counter.py") is chapter


def test_unknown_names_are_listed(tmp_path):
    course = make_course(tmp_path)
    with pytest.raises(ValueError, match="no chapter '9'.*ch01, ch02"):
        course.chapter("9")
    with pytest.raises(ValueError, match="no task 'ch01.2'.*ch01.1"):
        course.task("ch01.2")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('unlocks = "scaling"', 'unlock = "scaling"', "unknown keys"),
        ("[ch02.2]", "[ch02.3]", "not 1, 2, 3"),
        ('seat = "op:scale"', 'seat = "scale"', "seat 'scale'"),
        ('seat = "op:scale"', 'seat = "op:scale"\ndevice = "tpu"', "device 'tpu'"),
        ("[ch01]", "[first]\n[ch01]", "is no chapter"),
        ('todo = "multiply"', 'todo = ["multiply", "add"]', "a todo for each of"),
    ],
)
def test_faults_of_the_table_are_named(tmp_path, old, new, message):
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "course.toml").write_text(TABLE.replace(old, new))
    with pytest.raises(ValueError, match=message):
        load_course(tmp_path)


def test_several_methods_in_one_task(tmp_path):
    table = TABLE.replace(
        'unit = "Counter.add"', 'unit = ["Counter.add", "Counter.drain"]'
    ).replace(
        'contract = """Add."""', 'contract = { "Counter.add" = "A.", "Counter.drain" = "D." }'
    )
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "course.toml").write_text(table)
    task = load_course(tmp_path).task("ch02.1")
    assert task.units == ("Counter.add", "Counter.drain") and task.contracts == ("A.", "D.")
    assert task.todos == ("append", "append")
    path = tmp_path / "exercises" / "course.toml"
    path.write_text(table.replace('todo = "append"', 'todo = ["append", "empty"]'))
    assert load_course(tmp_path).task("ch02.1").todos == ("append", "empty")


def test_hints_come_one_at_a_time(tmp_path):
    course = make_course(tmp_path)
    assert [next_hint(course, "ch01.1").text for _ in range(4)] == ["i", "s", "c", "c"]
    assert next_hint(course, "ch01.1", level=1).text == "i"
    assert next_hint(course, "ch02.1").level == 1


def test_hints_must_match_the_table(tmp_path):
    course = make_course(tmp_path)
    hints = tmp_path / "exercises" / "hints.toml"
    hints.write_text(hints.read_text().replace("ch02.2", "ch02.7"))
    with pytest.raises(ValueError, match=r"ch02\.2.*ch02\.7"):
        load_hints(course)
