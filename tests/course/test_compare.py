"""The judgement: exact kind first, values last, nothing patched can move it."""

import math

import pytest
import torch

from minivllm.course.compare import compare, error_ratio, snapshot

TOL = {"float32": 1e-5, "float16": 4e-3}


class Yes(torch.Tensor):
    """A tensor that claims to equal everything."""

    def __eq__(self, other):
        return True


class AlwaysEqual:
    def __eq__(self, other):
        return True


@pytest.mark.parametrize(
    ("actual", "expected", "category"),
    [
        (None, torch.ones(2), "type"),
        (AlwaysEqual(), torch.ones(2), "type"),
        (torch.ones(2).as_subclass(Yes), torch.ones(2), "type"),
        (True, 1, "type"),
        (1.0, 1, "type"),
        ([1, 2], (1, 2), "type"),
        ([1], [1, 2], "shape"),
        (torch.ones(3), torch.ones(2), "shape"),
        (torch.ones(2, 1), torch.ones(2), "shape"),
        (torch.ones(2).half(), torch.ones(2), "dtype"),
        (torch.ones(2, device="meta"), torch.ones(2), "device"),
        (torch.tensor([1.0, math.nan]), torch.ones(2), "nan"),
        (torch.tensor([1.0, math.inf]), torch.ones(2), "values"),
        (torch.tensor([1.0, 1.1]), torch.ones(2), "values"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "values"),
        ({"a": 1}, {"a": 2}, "values"),
        ({"a": 1}, {"b": 1}, "values"),
        ([torch.ones(1), torch.zeros(1)], [torch.ones(1), torch.ones(1)], "values"),
        (2.0, 2.1, "values"),
        ("x", "y", "values"),
    ],
)
def test_wrong_answers_have_a_category(actual, expected, category):
    assert compare(actual, expected, TOL).category == category


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 2),
        torch.tensor([math.inf, -math.inf, math.nan]),
        torch.ones(0),
        torch.tensor([True]),
        [1, (2, "x"), {"k": torch.arange(3)}],
        None,
        0.1 + 0.2,
    ],
)
def test_equal_answers_pass(value):
    assert compare(snapshot(value), value, TOL) is None


def test_tolerance_grows_with_the_value():
    assert compare(torch.tensor([1000.005]), torch.tensor([1000.0]), TOL) is None
    assert compare(torch.tensor([0.00002]), torch.tensor([0.0]), TOL).category == "values"
    ratio = error_ratio(torch.tensor([1.0 + 1e-5]), torch.tensor([1.0]), TOL)
    assert ratio == pytest.approx(0.5, rel=0.01)


def test_text_names_the_first_bad_index_and_the_allowance():
    actual = torch.zeros(2, 2)
    actual[1, 0] = 0.5
    text = compare(actual, torch.zeros(2, 2), TOL).text
    assert text == (
        "0.5 at [1, 0], expected 0 (error 5.0e-01, allowed 1.0e-05); 1 of 4 values are wrong"
    )
    assert "returned None" in compare(None, 1, TOL).text
    text = compare({}, {"call 0: q": 1, "call 0: k": 2}, TOL).text
    assert text == "has the keys (none), expected 'call 0: k', 'call 0: q'"


@pytest.mark.parametrize("expected", [math.nan, math.inf])
def test_no_finite_number_is_close_to_nan_or_infinity(expected):
    # A diagnosis compares with a mistake's answer, which may hold either.
    found = compare(torch.tensor([1.0, 2.0]), torch.tensor([1.0, expected]), {"float32": 1e-3})
    assert found is not None and found.ratio == math.inf and "[1]" in found.text


def test_a_dtype_without_tolerance_is_the_authors_fault():
    with pytest.raises(ValueError, match="float64"):
        compare(torch.ones(1).double(), torch.ones(1).double(), TOL)


def test_patched_functions_judge_nothing(monkeypatch):
    for name in ("allclose", "equal", "isclose"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: True)
    monkeypatch.setattr(torch.Tensor, "__sub__", lambda self, other: torch.zeros(1))
    monkeypatch.setattr(torch.Tensor, "numpy", lambda self: None)
    assert compare(torch.zeros(2), torch.ones(2), TOL).category == "values"


def test_snapshot_is_not_reached_by_later_changes():
    x = torch.ones(2)
    kept = snapshot([x, {"k": x}])
    x.zero_()
    assert kept[0].sum() == 2 and kept[1]["k"].sum() == 2
