"""A failure shows the call that failed, not another one of the same test."""

import contextlib
import inspect

import pytest
import torch

from grader_tools import COURSE
from minivllm.course import checks
from minivllm.course.binding import Unit
from minivllm.course.calls import Calls
from minivllm.course.compare import snapshot
from minivllm.course.diagnosis import Trail
from minivllm.course.kill_table import grade_here
from minivllm.course.results import Failed


def unit(x, factor=1.0, names=()):
    if factor == 3:
        raise ValueError("three")
    return x.mul_(factor)


def test_arguments_are_described_before_the_call_changes_them():
    calls = Calls()
    calls.of(unit)(torch.tensor([[1.0, 0.25]]), factor=2.0, names=["a"])
    assert calls.text(raised=False) == "x = float32 [[1, 0.25]], factor = 2, names = ['a']"
    assert inspect.signature(calls.of(unit)) == inspect.signature(unit)


def test_large_and_odd_values():
    class Model:
        def __call__(self, ids):
            return ids

    calls = Calls()
    wrapped = calls.of(lambda model, ids: None)
    wrapped(Model(), torch.zeros(7, 8, dtype=torch.int64))
    wrapped(unit, list(range(100)))
    wrapped(unit, (token for token in range(3)))
    first, second, third = calls.seen
    assert first == "model = a Model, ids = int64 [7, 8]"
    assert second.startswith("model = unit, ids = [0, 1, 2,") and second.endswith("...")
    assert third == "model = unit, ids = a generator"


@pytest.mark.parametrize(
    ("factors", "raised", "text"),
    [
        ([2.0], False, "x = float32 [1], factor = 2"),
        ([2.0], True, "x = float32 [1], factor = 2"),
        ([1.0, 2.0], True, "call 2: x = float32 [1], factor = 2"),
        (
            [1.0, 2.0],
            False,
            "call 1: x = float32 [1], factor = 1\ncall 2: x = float32 [1], factor = 2",
        ),
        ([1.0] * 9, False, "9 calls"),
        ([], True, ""),
    ],
)
def test_which_calls_are_shown(factors, raised, text):
    calls = Calls()
    wrapped = calls.of(unit)
    for factor in factors:
        wrapped(torch.ones(1), factor)
    assert calls.text(raised) == text


def test_a_class_has_no_one_call():
    calls = Calls()
    assert calls.of(Calls) is Calls and calls.text(raised=True) == ""


@pytest.fixture
def check():
    """A check of `unit`, which is right where it doubles."""
    task = COURSE.task("ch02.1")
    mine = Unit("unit", "ch02", "mine", unit)
    return checks.Check(task, mine, None, Trail(task), 7, "doubled")


def numbers(seed):
    return torch.full((40,), float(seed))


def test_the_text_of_a_test_that_asks_more_than_once(check):
    x = check.inputs(numbers)
    check.close(x * 2.0, x, 2.0)
    with pytest.raises(Failed) as failed:
        check.close(x * 2.0, x, 5.0)
    lines = failed.value.text.splitlines()
    assert "input     x = float32 [40], factor = 5" in lines
    assert "          made from numbers(seed=7), which is" in lines
    with pytest.raises(Failed) as failed:
        check.probe(None, lambda f: [f(x.clone(), factor) for factor in (2.0, 3.0, 4.0)])
    assert "\ninput     call 2: x = float32 [40], factor = 3\n" in failed.value.text


@pytest.mark.parametrize("chapter", COURSE.chapters, ids=lambda chapter: chapter.id)
def test_no_two_calls_of_a_test_read_alike(chapter, monkeypatch):
    """Where one test asks twice, the printed input tells which of the two has failed."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    real = checks.Check._ask

    def spy(self, probe, *rest, **kwargs):
        if inspect.isfunction(self.unit):
            calls, exact = Calls(), []
            described = calls.of(self.unit)

            def recorded(*args, **named):
                exact.append(exactly([*args, *named.values()]))
                return described(*args, **named)

            with contextlib.suppress(Exception):
                probe(recorded)
            shown = f"{calls.text(raised=False)} {self._recipe}"
            of_test = found.setdefault((self.task.id, self._what), {})
            of_test.setdefault(shown, set()).add(repr(exact))
        return real(self, probe, *rest, **kwargs)

    monkeypatch.setattr(checks.Check, "_ask", spy)
    grade_here(COURSE, chapter, "reference")
    assert found
    alike = {test for test, shown in found.items() for calls in shown.values() if len(calls) > 1}
    assert not alike


def exactly(value):
    """All that a value holds, as something to compare; of an object only its type."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), snapshot(value).tolist()
    if isinstance(value, (list, tuple)):
        return [exactly(item) for item in value]
    return value if isinstance(value, (int, float, str, set)) else type(value).__name__
