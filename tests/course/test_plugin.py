"""The pytest plugin on the fake course: states, table, exit codes, JSON."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course_tools import TESTS, answer, make_course, solve, wrong
from minivllm.course.kill_table import grade_here
from minivllm.course.report import gradescope, terminal_lines
from minivllm.course.runner import child_environment, run_tests


def run(course, *chapters, impl="exercises", options=()):
    """Results by task and the output, of one run a chapter."""
    found = {}
    for chapter in chapters or ("ch01", "ch02", "ch03"):
        # Every fake course has test files of the same names; pytest keeps modules by name.
        for name in [name for name in sys.modules if ".test_ch0" in f".{name}"]:
            del sys.modules[name]
        grading, output = grade_here(course, course.chapter(chapter), impl, options)
        found |= {result.id: result for result in grading.results()}
    return found, output


def test_stubs_are_todo_in_one_line_each(tmp_path):
    course = make_course(tmp_path)
    results, output = run(course, "ch02")
    assert {r.state for r in results.values()} == {"todo"}
    rows = [line.split() for line in output.splitlines() if line.startswith("ch02.")]
    assert [row[:4] for row in rows] == [
        ["ch02.1", "Counter.add", "todo", "0/2"],
        ["ch02.2", "Counter.total", "todo", "0/3"],
    ]
    # The last column leads to the line to replace.
    name, line = rows[0][4].split(":")
    stub = (course.root / "exercises" / name).read_text().splitlines()
    assert 'NotImplementedError("ch02.1' in stub[int(line) - 1]
    assert "0/5, next: ch02.1" in output and "Traceback" not in output


def test_solutions_and_reference_get_full_points(tmp_path):
    course = make_course(tmp_path)
    for impl in ("solutions", "reference"):
        results, output = run(course, impl=impl)
        assert sum(r.earned for r in results.values()) == 10
    assert "all done" in output


def test_states(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch01", "def scale(x, factor):\n    return x + factor\n")
    answer(course, "ch02", "class Counter(:\n")
    results, output = run(course)
    assert results["ch01.1"].state == "wrong" and results["ch01.1"].earned == 0
    assert results["ch02.1"].state == results["ch02.2"].state == "broken"
    assert results["ch02.1"].label == "broken file" and "invalid syntax" in results["ch02.1"].text
    assert results["ch03.1"].state == "todo"


def test_a_sibling_that_is_called_blocks(tmp_path):
    course = make_course(tmp_path)
    solve(course, "ch02")
    path = course.root / "exercises" / "ch02_counter.py"
    text = path.read_text().replace("        return len(self.items)", "        return self.total()")
    path.write_text(
        text.replace("return math.fsum(self.items)", 'raise NotImplementedError("ch02.2: total")')
    )
    results, _ = run(course, "ch02")
    assert results["ch02.1"].label == "blocked by ch02.2" and results["ch02.2"].state == "todo"


def test_chain_blocks_by_an_earlier_chapter(tmp_path):
    course = make_course(tmp_path)
    solve(course, "ch02")
    assert run(course, "ch02")[0]["ch02.1"].state == "pass"
    chained, output = run(course, "ch02", options=["--chain"])
    assert chained["ch02.1"].label == "blocked by ch01.1"
    assert chained["ch02.2"].state == "pass"
    assert "blocked by ch01.1" in output


def test_chain_names_a_wrong_earlier_chapter_that_is_not_run(tmp_path):
    course = make_course(tmp_path)
    solve(course, "ch02", "ch03")
    answer(course, "ch01", "def scale(x, factor):\n    return x * factor + 1\n")
    assert run(course, "ch03")[0]["ch03.1"].state == "pass"
    chained = run(course, "ch03", options=["--chain"])[0]
    assert list(chained) == ["ch03.1"] and chained["ch03.1"].state == "wrong"
    assert "diagnosis ch01.1 is wrong too; if this unit calls it" in chained["ch03.1"].text


def test_a_folder_is_one_beside_the_caller_not_beside_the_course(tmp_path, monkeypatch):
    course = make_course(tmp_path)
    beside = tmp_path / "elsewhere"
    shutil.copytree(course.root / "solutions", beside / "mine")
    monkeypatch.chdir(beside)
    (task,) = run_tests(course, ["ch01"], "mine").progress["tasks"]
    assert task["state"] == "pass"


def test_failure_text_has_check_result_input_diagnosis_and_hint(tmp_path, monkeypatch):
    course = make_course(tmp_path)
    answer(course, "ch01", "def scale(x, factor):\n    return x + factor\n")
    listed = [wrong("ch01.1", "sum", lambda x, factor: x + factor)]
    monkeypatch.setattr("minivllm.course.diagnosis.load_mistakes", lambda chapter: listed)
    text = run(course, "ch01", options=["--task=ch01.1"])[0]["ch01.1"].text
    assert 'this is what "sum" gives: message of sum.' in text
    assert "minivllm course hint ch01.1" in text and "checked   the example" in text
    # The first test of the two that fail is shown; the other has the recipe of its input.
    monkeypatch.setattr("minivllm.course.diagnosis.load_mistakes", lambda chapter: [])
    path = course.root / "exercises" / "test_ch01_scale.py"
    path.write_text(TESTS["ch01_scale"].replace("    check.example()", "    pass"))
    text = run(course, "ch01")[0]["ch01.1"].text
    assert "numbers(seed=7), which is" in text and "torch.randn(4, generator=g)" in text
    assert "error" in text and "allowed" in text and "diagnosis" not in text


def test_errors_show_the_students_line(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch01", "def scale(x, factor):\n    return x / undefined\n")
    text = run(course, "ch01")[0]["ch01.1"].text
    assert "raised NameError" in text and "ch01_scale.py line 2: return x / undefined" in text


def test_prints_of_a_student_do_not_spoil_the_example(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch01", "def scale(x, factor):\n    print('here', x)\n    return x * factor\n")
    assert run(course, "ch01")[0]["ch01.1"].state == "pass"


def test_returned_none_is_said(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch01", "def scale(x, factor):\n    x * factor\n")
    _, output = run(course, "ch01")
    text = run(course, "ch01", options=["-k", "product"])[0]["ch01.1"].text
    assert "returned None" in text and "only the tests you picked" not in text
    # The example, where Python itself prints nothing for None.
    text = run(course, "ch01")[0]["ch01.1"].text
    assert "got      None (is the return missing?)" in text.replace("result    ", "")


def test_system_exit_in_a_unit_is_wrong_and_ends_nothing(tmp_path):
    course = make_course(tmp_path)
    answer(course, "ch01", "def scale(x, factor):\n    raise SystemExit(0)\n")
    assert run(course, "ch01")[0]["ch01.1"].state == "wrong"


def test_a_task_without_a_test_is_an_error(tmp_path):
    course = make_course(tmp_path)
    path = course.root / "exercises" / "test_ch02_counter.py"
    path.write_text(TESTS["ch02_counter"].replace('"ch02.2"', '"ch02.1"'))
    found = run_tests(course, ["ch02"], "solutions")
    tasks = {task["id"]: task for task in found.progress["tasks"]}
    assert tasks["ch02.2"]["label"] == "no test ran" and found.returncode == 1


def test_hidden_tests_show_name_and_category_only(tmp_path):
    course = make_course(tmp_path)
    solve(course, "ch01")
    hidden = tmp_path / "secret"
    hidden.mkdir()
    (hidden / "test_ch01_more.py").write_text(
        'import pytest, torch\n@pytest.mark.task("ch01.1")\ndef test_zero_factor(check):\n'
        '    """secret words"""\n    check.close(torch.ones(1) * 42, torch.ones(1), 0.0)\n'
    )
    (hidden / "test_ch02_more.py").write_text(
        'import pytest\n@pytest.mark.task("ch02.1")\ndef test_other(check): check.example()\n'
    )
    results, output = run(course, "ch01", options=["--hidden", str(hidden)])
    assert list(results) == ["ch01.1"] and results["ch01.1"].state == "wrong"
    assert "hidden test zero_factor: values" in results["ch01.1"].text
    assert "secret words" not in output and "42" not in results["ch01.1"].text


def test_single_test_and_single_task_runs(tmp_path):
    course = make_course(tmp_path)
    results, _ = run(course, "ch02", options=["--task", "ch02.2"])
    assert list(results) == ["ch02.2"]
    path = course.root / "exercises" / "test_ch02_counter.py"
    command = [sys.executable, "-m", "pytest", "-p", "minivllm.course.pytest_plugin"]
    command += [f"{path}::test_total", "--rootdir", str(tmp_path), "--impl", "solutions", "-v"]
    environment = run_environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0 and "3/3, all done" in done.stdout
    assert "only the tests you picked" in done.stdout and "test_total PASS" in done.stdout


def run_environment(folder):
    environment = child_environment()
    return {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{folder}"}


def test_json_and_exit_code_of_a_real_run(tmp_path, monkeypatch):
    """`pytest exercises/` as a student calls it."""
    course = make_course(tmp_path)
    solve(course, "ch01")
    command = [sys.executable, "-m", "pytest", "-p", "minivllm.course.pytest_plugin", "exercises/"]
    command += ["--rootdir", ".", "--grade-json", "out/results.json", "--junitxml", "out/j.xml"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=run_environment(tmp_path)
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ch01.1  scale") and "1/1" in line for line in lines)
    assert any(line.startswith("1/10, next: ch02.1") for line in lines)
    assert "Traceback" not in done.stdout and "FAILURES" not in done.stdout
    assert f"{tmp_path / 'exercises' / 'ch01_scale.py'} (" in done.stdout
    grades = json.loads((tmp_path / "out" / "results.json").read_text())
    assert grades["score"] == 1 and grades["max_score"] == 10
    for entry in grades["tests"]:
        assert set(entry) >= {"name", "score", "max_score", "output", "visibility"}
    progress = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert progress["next"] == "ch02.1" and progress["seed"] == 7 and progress["version"] == "0.0.1"
    xml = (tmp_path / "out" / "j.xml").read_text()
    assert xml.count("<failure") == 6 and "todo" in xml


def test_unknown_impl_is_a_usage_error(tmp_path):
    course = make_course(tmp_path)
    found = run_tests(course, ["ch01"], "nowhere")
    assert found.returncode == 4 and "nowhere" in found.output and not found.progress


def test_other_tests_are_left_alone(tmp_path):
    (tmp_path / "test_plain.py").write_text("def test_plain():\n    assert 1 == 2\n")
    command = [sys.executable, "-c", PROBE, str(tmp_path / "test_plain.py"), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=run_environment(tmp_path)
    )
    assert "assert 1 == 2" in done.stdout and "minivllm course" not in done.stdout
    assert "torch loaded: False" in done.stdout


PROBE = """
import sys, pytest
pytest.main([sys.argv[1], "--rootdir", sys.argv[2], "-p", "minivllm.course.pytest_plugin"])
print("torch loaded:", "torch" in sys.modules)
"""


@pytest.mark.parametrize("gpu", [False, True])
def test_gpu_tasks_cost_nothing_without_a_gpu(tmp_path, monkeypatch, gpu):
    course = make_course(tmp_path)
    table = Path(tmp_path / "exercises" / "course.toml")
    table.write_text(
        table.read_text().replace('seat = "op:scale"', 'seat = "op:scale"\ndevice = "cuda"')
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    results, output = run(course, "ch01", impl="solutions")
    state = "pass" if gpu else "unavailable"
    assert results["ch01.1"].state == state and results["ch01.1"].offered == int(gpu)
    assert gpu or "not gradable here" in output
    assert gradescope(list(results.values()))["max_score"] == int(gpu)
    assert terminal_lines(course, list(results.values()))[-1].endswith("all done")
