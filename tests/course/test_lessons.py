"""Every committed lesson runs from a clean kernel and is as `make lessons` leaves it."""

import json
import re
from pathlib import Path

import pytest

from minivllm.course.lessons import execute, lesson_paths
from minivllm.course.table import load_course

COURSE = load_course(Path(__file__).resolve().parents[2])
LESSONS = lesson_paths(COURSE)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_committed_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert notebook["metadata"]["minivllm"]["made_by"] == "make lessons"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    # Nothing hot-linked: a lesson must be readable on a train.
    text = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert not re.search(r"!\[[^]]*\]\(https?:|<img[^>]+https?:", text)
    assert path.stat().st_size < 600_000


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_executes_from_a_clean_kernel(path):
    pytest.importorskip("nbclient")
    before = path.read_bytes()
    notebook = execute(path, COURSE)  # raises at the first failing cell
    assert path.read_bytes() == before
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def test_lessons_by_name():
    """The tour has no tasks, so the table does not know it."""
    found = [path.name for path in lesson_paths(COURSE, ["00", "ch02", "4"])]
    assert found == ["00_tour.ipynb", "02_rmsnorm.ipynb", "04_attention.ipynb"]
    with pytest.raises(ValueError, match="no chapter '77'"):
        lesson_paths(COURSE, ["77"])


def test_every_chapter_lists_its_lesson():
    """Lessons are named by the table, so that links and `make lessons` find them."""
    named = {chapter.lesson for chapter in COURSE.chapters}
    assert {path.name for path in LESSONS if not path.name.startswith("00")} <= named
