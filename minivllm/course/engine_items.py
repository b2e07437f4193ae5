"""`--engine`: one more test a task, which runs the answer inside the program it was written for.

Owns the pytest items: first each unit alone, with --chain then among the student's earlier units,
at last all that were right together. A seat `op:` or `part:` is in the engine; `stage:` in the
latest stage that runs on the unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from minivllm.course.results import BLOCKED, BROKEN, TODO, WRONG, Failed
from minivllm.course.table import Task

if TYPE_CHECKING:
    from minivllm.course.engine_check import Trace
    from minivllm.course.grading import Grading


class EngineItem(pytest.Item):
    """The engine with the units of `tasks` in their seats."""

    def __init__(self, *, tasks: list[Task], runs: EngineRuns, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tasks = tasks
        self.runs = runs
        # All together is the business of the last: the others have already passed alone.
        self.add_marker(pytest.mark.task(tasks[-1].id))

    def runtest(self) -> None:
        if len(self.tasks) == 1:
            self.runs.check_alone(self.tasks[0])
        else:
            self.runs.check_together(self.tasks)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name


class EngineRuns:
    """The engine's own trace, made once, and which units were right alone."""

    def __init__(self, grading: Grading, model: str) -> None:
        self.grading = grading
        self.model = model
        self.right: list[Task] = []
        self._expected: dict[str, Trace] = {}  # by program
        self._faults: dict[tuple[str, str], str] = {}  # of an earlier task alone, by program

    def check_alone(self, task: Task) -> None:
        """Raise `Failed` unless the program writes the same with this unit in its seat."""
        what = f"{', '.join(task.units)} in {_program_of(task)}"
        wrote = self._check([task], what)
        if self.grading.chain:
            wrote = self._check_chained(task, what) or wrote
        self._say(task.id, _program_of(task), wrote)
        self.right.append(task)

    def check_together(self, tasks: list[Task]) -> None:
        """The same with all units that were right alone, program by program."""
        right = [task for task in tasks if task in self.right]
        for program in dict.fromkeys(_program_of(task) for task in right):
            group = [task for task in right if _program_of(task) == program]
            if len(group) > 1:
                names = ", ".join(dict.fromkeys(task.name for task in group))
                wrote = self._check(group, f"{names} together in {program}")
                self._say("all", program, wrote)

    def _check_chained(self, task: Task, what: str) -> str:
        """The same among the student's earlier units; blocked by the first that is wrong alone."""
        program = _program_of(task)
        earlier = [t for t in self.grading.done_before(task.chapter)[0] if _runs_in(t, program)]
        if not earlier:
            return ""
        try:
            return self._check([*earlier, task], f"{what}, with your earlier units", program)
        except Failed as failed:
            for other in earlier:
                text = self._fault(other, program)
                if text:
                    raise Failed(BLOCKED, other.id, f"{other.id} in {program}: {text}") from None
            raise failed

    def _fault(self, task: Task, program: str) -> str:
        """What is wrong with an earlier unit alone in `program`, in one line; empty if nothing."""
        key = (program, task.id)
        if key not in self._faults:
            try:
                self._check([task], task.name, program)
                self._faults[key] = ""
            except Failed as failed:
                self._faults[key] = failed.text.rpartition("deviates: ")[2].partition("\n")[0]
        return self._faults[key]

    def _say(self, name: str, program: str, wrote: str) -> None:
        what = "wrote" if program == "engine" else f"{program} wrote the tokens"
        self.grading.engine_lines.append(
            f"engine[{name}]  pass  {what}: {wrote} (as the reference)"
        )

    def _check(self, tasks: list[Task], what: str, program: str = "") -> str:
        """The start of what was written. Raises `Failed` if it is not what the reference writes."""
        from minivllm.course import engine_check
        from minivllm.course.checks import labelled

        # Makes the usual remarks on a broken file or a forbidden name.
        for task in tasks:
            self.grading.check_for(task.id, what)
        program = program or _program_of(tasks[0])
        units: dict[str, Any] = {}
        for task in tasks:
            units |= _seated(self.grading, task, program)
        if program not in self._expected:
            self._expected[program] = engine_check.run_program(program, self.model, {})
        ids = ", ".join(task.id for task in tasks)
        try:
            actual = engine_check.run_program(program, self.model, units)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _failure(error, tasks, what) from None
        found = engine_check.deviation(actual, self._expected[program])
        if not found:
            return engine_check.opening(actual)
        text = labelled("checked", f'{what}: model "{self.model}", greedy')
        text += f"\n{labelled('result', f'{ids} deviates: {found}')}"
        raise Failed(WRONG, "engine", text)


def engine_items(session: pytest.Session, grading: Grading, model: str) -> list[EngineItem]:
    """One item for each selected task, and one for all of them together."""
    tasks = [grading.course.task(task_id) for task_id in grading.selected]
    runs = EngineRuns(grading, model)
    items = [_item(session, f"engine[{task.id}]", tasks=[task], runs=runs) for task in tasks]
    if len(tasks) > 1:
        items.append(_item(session, "engine[all]", tasks=tasks, runs=runs))
    return items


def _item(session: pytest.Session, name: str, **kwargs: Any) -> EngineItem:
    # The part before `::` is what pytest shows before the dots, as a file's name elsewhere.
    return EngineItem.from_parent(session, name=name, nodeid=f"engine::{name}", **kwargs)


def _program_of(task: Task) -> str:
    from minivllm.course.engine_check import program_of

    return program_of(task)


def _runs_in(task: Task, program: str) -> bool:
    """Whether a stage runs on the task's unit, or the engine has its seat."""
    from minivllm.stages.build import USED

    if program == "engine":
        return not task.seat.startswith("stage:")
    return task.name in USED[program]


def _seated(grading: Grading, task: Task, program: str) -> dict[str, Any]:
    """The unit by the name it has in `program`: a stage knows all by their own."""
    bound = grading.units(task.chapter)
    return bound.seated([task]) if program == "engine" else {task.name: bound.of(task).value}


def _failure(error: BaseException, tasks: list[Task], what: str) -> Failed:
    """A stub inside the engine is todo, as it is in its own tests; all else is wrong."""
    named = str(error).partition(":")[0]
    if isinstance(error, NotImplementedError) and named.startswith("ch"):
        if named in {task.id for task in tasks}:
            return Failed(TODO, "todo", "not written yet")
        return Failed(BLOCKED, named, f"it calls {named}, which is not written yet")
    if isinstance(error, FileNotFoundError):
        return Failed(BROKEN, "model", str(error))
    return Failed(WRONG, "engine", f"{what} raised {type(error).__name__}: {error}")
