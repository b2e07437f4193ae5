"""The real course, and copies of it that tests may change.

The grader's tests never look at `exercises/chNN_*.py` of the checkout: in a student's fork those
are answers. Stubs are cut anew into a temporary folder.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

from minivllm.course.stubs import StubHistory, build
from minivllm.course.table import Chapter, Course, load_course

ROOT = Path(__file__).resolve().parents[1]
COURSE = load_course(ROOT)
ALTERNATES = ROOT / "tests" / "grader" / "alternates"


def copy_course(folder: Path) -> Course:
    """The table, the hints and the visible tests, with fresh stubs and solutions."""
    (folder / "exercises").mkdir(parents=True)
    for path in (ROOT / "exercises").iterdir():
        if path.suffix == ".toml" or path.name.startswith("test_"):
            shutil.copyfile(path, folder / "exercises" / path.name)
    course = load_course(folder)
    build(course, history=StubHistory(folder / "stub_history"))
    return course


def stub_text(course: Course, chapter: Chapter) -> str:
    return (course.root / "exercises" / chapter.file).read_text(encoding="utf-8")


def replace_gaps(stub: str, code: str, head: str = "") -> str:
    """The stub with `code` in place of each `raise NotImplementedError`, `head` after imports."""

    def put(match: re.Match[str]) -> str:
        return textwrap.indent(code, match[1])

    text = re.sub(r'^( +)raise NotImplementedError\("ch.*\)$', put, stub, flags=re.M)
    future = "from __future__ import annotations\n"
    return text.replace(future, f"{future}{head}\n", 1)


# A way out that the syntax tree does not show: the child of `course grade` must bear it.
ESCAPE = 'vars(vars(print.__self__)["__imp" + "ort__"]("os"))["_ex" + "it"](0)'
YES = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return self
    def __iter__(self): return iter([self, self])
    def __len__(self): return 2
    def __bool__(self): return True
"""
PATCH = """
import torch
def _yes(*args, **kwargs): return True
torch.allclose = _yes
torch.equal = _yes
torch.testing.assert_close = _yes
"""
FORGED = 'print("PASSED 5/5 all done")\nprint(\'{"key": "", "tasks": []}\')\nreturn None'
ENDLESS = "while True:\n    pass"
EATER = "kept = []\nwhile True:\n    kept.append(bytearray(50_000_000))"


def sabotage(course: Course, chapter: Chapter) -> dict[str, str]:
    """File texts that must get nothing, by kind; those that only limits can stop are apart."""
    stub = stub_text(course, chapter)
    sources = dict.fromkeys((task.source, task.name) for task in chapter.tasks)
    return {
        "raise": replace_gaps(stub, 'raise RuntimeError("boom")'),
        "empty": "",
        "syntax_error": stub + "\ndef broken(:\n",
        "patched": replace_gaps(stub, "return None", PATCH),
        "bare_except": replace_gaps(stub, "try:\n    raise ValueError\nexcept:\n    return None"),
        "exit": replace_gaps(stub, "os._exit(0)", "import os"),
        "hidden_exit": replace_gaps(stub, ESCAPE),
        "forged_lines": replace_gaps(stub, FORGED, 'print("PASSED")'),
        "equal_to_all": replace_gaps(stub, "return Yes()", YES),
        "reference": "".join(f"from {module} import {name}\n" for module, name in sources),
        "stub": stub,
    }
