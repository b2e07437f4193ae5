"""One run of the exercises: which tasks, whose units, what came of each test.

Owns the state that the pytest plugin keeps between its hooks. Knows nothing of pytest, and imports
torch only when the first check is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.course.loading import LoadedFile
from minivllm.course.results import TODO, WRONG, Failed, TaskResult, TestResult, summarize
from minivllm.course.stubs import digest, read_text
from minivllm.course.table import Course, Task

if TYPE_CHECKING:
    from minivllm.course.binding import Units
    from minivllm.course.checks import Check
    from minivllm.course.diagnosis import Trail


@dataclass(frozen=True)
class FileMark:
    """A file that is graded, and the hash of its text."""

    path: Path
    digest: str


@dataclass
class Grading:
    """A run's options and its results so far."""

    course: Course
    impl: str = "exercises"
    chain: bool = False
    seed: int = 0
    threads: int = 1
    selected: list[str] = field(default_factory=list)  # ids of the tasks to report
    narrowed: bool = False  # single tests were picked: no task has all of its tests
    tests: list[TestResult] = field(default_factory=list)
    trails: dict[str, Trail] = field(default_factory=dict)
    engine_lines: list[str] = field(default_factory=list)  # what each --engine run wrote
    _units: dict[str, Units] = field(default_factory=dict)

    def units(self, chapter: str) -> Units:
        """The chapter's units, loaded at the first call of a run."""
        if chapter not in self._units:
            import torch

            # Bound before a student's file is loaded: see compare.py.
            import minivllm.course.checks  # noqa: F401
            from minivllm.course.binding import units

            # Small tensors gain nothing from threads, and lose much beside a busy neighbour.
            torch.set_num_threads(self.threads)
            self._units[chapter] = units(self.impl, [chapter], self.course, self.chain)
        return self._units[chapter]

    def check_for(self, task_id: str, what: str) -> Check:
        """The `check` of one test. Raises `Failed` where nothing can be checked."""
        from minivllm.course.checks import Check
        from minivllm.course.diagnosis import Trail

        task = self.course.task(task_id)
        bound = self.units(task.chapter)
        trail = self.trails.setdefault(task_id, Trail(task))
        return Check(task, bound.of(task), bound.before[task.chapter], trail, self.seed, what)

    def done_before(self, chapter: str) -> tuple[list[Task], list[Task]]:
        """Tasks of earlier chapters: those whose answer can run in the engine, and the others.

        A class counts as done when all its tasks are. Nothing is tested here: done may be wrong.
        """
        done: list[Task] = []
        undone: list[Task] = []
        tasks = [t for t in self.course.tasks if t.chapter < chapter and t.device == "cpu"]
        lacking = {(t.chapter, t.name) for t in tasks if not self._is_done(t)}
        for task in tasks:
            (undone if (task.chapter, task.name) in lacking else done).append(task)
        return done, undone

    def _is_done(self, task: Task) -> bool:
        unit = self.units(task.chapter).of(task)
        violations = unit.file.violations if unit.file else ()
        refused = any(task.id in violation.tasks for violation in violations)
        return unit.value is not None and not refused and not self._todo_line(task.id)

    def failed(self, task_id: str, test: str, error: Failed, hidden: bool = False) -> TestResult:
        """The result of a test that ended with `Failed`."""
        line = self._todo_line(task_id) if error.state == TODO else 0
        # A hidden test shows its name and the category, and never its inputs or values.
        text = f"hidden test {test}: {error.category}" if hidden else error.text
        return TestResult(task_id, test, error.state, error.category, text, hidden, line)

    def with_closing(self, result: TestResult) -> str:
        """A wrong test's text, with diagnosis and hint."""
        if result.state != WRONG:
            return result.text
        from minivllm.course.checks import closing

        task = self.course.task(result.task)
        trail = None if result.hidden else self.trails.get(task.id)
        # A unit often calls the one before it in its file: that one comes first. So do those of
        # earlier chapters, where they are the student's too.
        wrong = {test.task for test in self.tests if test.state == WRONG}
        wrong |= set(self._wrong_earlier if self.chain else ())
        near = "" if self.chain else task.chapter
        before = sorted(other for other in wrong if other < task.id and other.startswith(near))
        if result.category == "forbidden":
            before = []
        return f"{result.text}\n{closing(trail, task, before)}"

    @cached_property
    def _wrong_earlier(self) -> list[str]:
        """Wrong tasks of the earlier chapters that this run itself does not test."""
        from minivllm.course.runner import run_tests

        tested = {task_id.partition(".")[0] for task_id in self.selected}
        earlier = [c.id for c in self.course.chapters if c.id < max(tested) and c.id not in tested]
        if not earlier:
            return []
        options = ["--chain", "--course-seed", str(self.seed)]
        found = run_tests(self.course, earlier, self.impl, options).progress
        return [task["id"] for task in found.get("tasks", []) if task["state"] == WRONG]

    def results(self) -> list[TaskResult]:
        """One result a task; the diagnosis rests on all the questions that the tests asked."""
        tasks = [task for task in self.course.tasks if task.id in self.selected]
        found = []
        for result in summarize(tasks, self.tests):
            wrong = [test for test in result.tests if test.state == WRONG]
            if result.state == WRONG:
                shown = min(wrong, key=lambda test: test.hidden)
                result = replace(result, text=self.with_closing(shown))
            found.append(result)
        return found

    def files(self, chapters: list[str]) -> list[FileMark]:
        """The graded files that exist, with their hashes, without running them."""
        from minivllm.course.binding import answer_path

        if self.impl == "reference" or self.impl.startswith("mistake:"):
            return []
        paths = [answer_path(self.impl, self.course, self.course.chapter(c)) for c in chapters]
        return [FileMark(path, _mark(path)) for path in dict.fromkeys(paths) if path.is_file()]

    def _todo_line(self, task_id: str) -> int:
        file: LoadedFile | None = (
            self.units(task_id.partition(".")[0]).of(self.course.task(task_id)).file
        )
        # Of a missing or unreadable file the remark on the file says enough.
        lines = read_text(file.path).splitlines() if file and file.module else []
        marks = [n for n, line in enumerate(lines, 1) if f'NotImplementedError("{task_id}' in line]
        return marks[0] if marks else 0


def _mark(path: Path) -> str:
    try:
        return digest(read_text(path))
    except (OSError, UnicodeDecodeError):
        return "unreadable"
