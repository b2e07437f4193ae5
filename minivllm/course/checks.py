"""What a visible or hidden test asks of a unit: the `check` fixture.

Owns the calls into a student's code and the text of a failure. Every call goes through `_ask`,
which records question and answer for the diagnosis. Importing this module binds the comparison
functions, so it must happen before a student's file is loaded.
"""

from __future__ import annotations

import doctest
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.course.binding import Unit
from minivllm.course.calls import Calls
from minivllm.course.compare import Difference, compare, error_ratio, snapshot
from minivllm.course.diagnosis import Outcome, Probe, Step, Trail, diagnosis_text, observe
from minivllm.course.loading import location
from minivllm.course.results import BLOCKED, BROKEN, TODO, UNAVAILABLE, WRONG, Failed
from minivllm.course.table import Task

# Code keeps its own line ends and its indent.
_WRAP: dict[str, Any] = {"replace_whitespace": False, "break_long_words": False}


class _AfterPrints(doctest.OutputChecker):
    """A student who prints to look around has not answered wrongly: the last lines count."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        want = want.replace(doctest.BLANKLINE_MARKER, "")  # doctest's own check reads it so, too
        return want in ("", got) or got.endswith(f"\n{want}")


class Check:
    """One test's questions to one unit.

    `unit` is the student's object, `earlier` holds the units of earlier chapters by name, `seed`
    is the seed of this run's inputs. A check that does not hold raises `Failed`.
    """

    def __init__(self, task: Task, unit: Unit, earlier: Any, trail: Trail, seed: int, what: str):
        self.task = task
        self.unit = unit.value
        self.earlier: SimpleNamespace = earlier
        self.seed = seed
        self._bound = unit
        self._trail = trail
        self._what = what
        self._recipe = ""
        self._ratio = 0.0  # error over allowed error of the last right answer
        self._refuse_unusable()

    def inputs(self, recipe: Callable[[int], Any], seed: int = 0) -> Any:
        """`recipe(seed)`, remembered so that a failure can show how to make the same inputs."""
        number = self.seed + seed
        source = textwrap.dedent(inspect.getsource(recipe))
        body = source.partition(":\n")[2]
        self._recipe = f"{recipe.__name__}(seed={number}), which is\n{body.rstrip()}"
        return recipe(number)

    def close(self, expected: Any, *args: Any, **kwargs: Any) -> None:
        """The unit called with copies of `args` gives `expected` (see `compare`)."""
        self.probe(expected, lambda unit: unit(*snapshot(args), **snapshot(kwargs)))

    def probe(self, expected: Any, probe: Probe) -> None:
        """`probe(unit)` gives `expected`. It must make its own fresh inputs: it runs repeatedly."""

        def judge(outcome: Outcome) -> Difference | None:
            found = compare(outcome.value, expected, self.task.tolerance)
            if found is None:
                self._ratio = error_ratio(outcome.value, expected, self.task.tolerance)
            return found

        self._ask(probe, judge)

    def holds(self, probe: Probe, meaning: str) -> None:
        """`probe(unit)` gives True; `meaning` says in words what that stands for."""

        def judge(outcome: Outcome) -> Difference | None:
            return None if outcome.value is True else Difference("property", f"not so: {meaning}")

        self._ask(probe, judge)

    def raises(self, kind: type[BaseException], probe: Probe) -> None:
        """`probe(unit)` raises `kind` (a subclass will do)."""

        def judge(outcome: Outcome) -> Difference | None:
            text = f"raised nothing, expected {kind.__name__}"
            return None if isinstance(outcome.error, kind) else Difference("raised", text)

        self._ask(probe, judge, may_raise=kind)

    def leaves_inputs_alone(self, *args: Any) -> None:
        """The unit changes none of its tensor arguments."""

        def probe(unit: Any) -> list[bool]:
            copies = snapshot(args)
            unit(*copies)
            pairs = [(a, b) for a, b in zip(args, copies) if isinstance(a, torch.Tensor)]
            return [compare(b, a, {str(a.dtype)[6:]: 0.0}) is None for a, b in pairs]

        def judge(outcome: Outcome) -> Difference | None:
            if all(outcome.value):
                return None
            names = list(inspect.signature(self.unit).parameters)
            changed = names[outcome.value.index(False)]
            return Difference("inputs", f"changed its argument {changed} in place")

        self._ask(probe, judge)

    def example(self) -> None:
        """The worked example of the stub, as Python's doctest runs it."""

        def probe(unit: Any) -> str:
            # The unit last: a class may continue an earlier chapter's of the same name.
            names = {"torch": torch, **vars(self.earlier), self.task.name: unit}
            test = doctest.DocTestParser().get_doctest(
                self.task.example, names, self.task.id, None, None
            )
            runner = doctest.DebugRunner(_AfterPrints(), verbose=False)
            try:
                runner.run(test)
            except doctest.UnexpectedException as error:
                raise error.exc_info[1] from None
            except doctest.DocTestFailure as failure:
                want = failure.example.want.replace(doctest.BLANKLINE_MARKER, "")
                got = failure.got.rstrip() or "None (is the return missing?)"
                return f">>> {failure.example.source}got      {got}\nexpected {want.rstrip()}"
            return ""

        def judge(outcome: Outcome) -> Difference | None:
            return Difference("example", outcome.value) if outcome.value else None

        self._ask(probe, judge)

    def needs_gpu(self) -> None:
        """Marks the task not gradable where there is no CUDA device."""
        if not torch.cuda.is_available():
            raise Failed(UNAVAILABLE, "device", "needs a CUDA device")

    def _refuse_unusable(self) -> None:
        """Nothing is called where the file is broken or uses what is forbidden."""
        file = self._bound.file
        for violation in file.violations if file else ():
            if file and self.task.id in violation.tasks:
                text = f"{file.path.name} line {violation.line}: {violation.text}"
                raise Failed(WRONG, "forbidden", text)
        if self._bound.problem:
            raise Failed(BROKEN, "file", self._bound.problem)
        if self.task.device == "cuda":
            self.needs_gpu()

    def _ask(
        self,
        probe: Probe,
        judge: Callable[[Outcome], Difference | None],
        may_raise: type[BaseException] | None = None,
    ) -> None:
        calls = Calls()
        outcome = observe(probe, calls.of(self.unit))
        if outcome.error is not None and not (may_raise and isinstance(outcome.error, may_raise)):
            self._unfinished(outcome.error)
            difference: Difference | None = self._raised(outcome.error)
        else:
            difference = judge(outcome)
        ratio = difference.ratio if difference else self._ratio
        self._trail.steps.append(Step(probe, outcome, difference is not None, ratio))
        if difference:
            asked = calls.text(raised=outcome.error is not None)
            raise Failed(WRONG, difference.category, self._text(difference, asked))

    def _unfinished(self, error: BaseException) -> None:
        """A stub's own error means todo; that of another task means blocked."""
        found = re.match(r"(ch\d\d\.\d+):", str(error))
        if not isinstance(error, NotImplementedError) or not found:
            return
        if found[1] == self.task.id:
            raise Failed(TODO, "todo", "not written yet")
        raise Failed(BLOCKED, found[1], f"it calls {found[1]}, which is not written yet")

    def _raised(self, error: BaseException) -> Difference:
        said = str(error)
        if isinstance(error, AssertionError):
            said = said.partition("\nassert ")[0]  # pytest adds the values it compared
        text = f"raised {type(error).__name__}: {said}".rstrip(": ")
        file = self._bound.file
        where = location(error, file.path) if file else ""
        if file and where:
            line = linecache.getline(str(file.path), int(where.split()[-1])).strip()
            text += f"\n{file.path.name}{where}: {line}"
        return Difference("raised", text)

    def _text(self, difference: Difference, asked: str) -> str:
        parts = [("checked", self._what)] if self._what else []
        parts += [("result", difference.text)]
        # An example shows its own call.
        asked = asked if difference.category != "example" else ""
        recipe = f"made from {self._recipe}" if asked and self._recipe else self._recipe
        if asked or recipe:
            parts += [("input", f"{asked}\n{recipe}".strip())]
        return "\n".join(labelled(label, text) for label, text in parts)


def labelled(label: str, text: str) -> str:
    """A block of a failure text: the label once, further lines under the first."""
    first, *rest = [
        part for line in text.splitlines() for part in textwrap.wrap(line, 86, **_WRAP) or [""]
    ]
    return "\n".join([f"{label:<10}{first}", *(f"{'':<10}{line}" for line in rest)])


def closing(trail: Trail | None, task: Task, wrong_before: Sequence[str] = ()) -> str:
    """What ends a failure text: the diagnosis, if there is one, and the way to a hint."""
    lines = []
    found = diagnosis_text(trail) if trail else ""
    if found:
        lines.append(labelled("diagnosis", found))
    elif wrong_before:
        text = f"{wrong_before[0]} is wrong too; if this unit calls it, mend that one first."
        lines.append(labelled("diagnosis", text))
    return "\n".join([*lines, labelled("hint", f"minivllm course hint {task.id}")])
