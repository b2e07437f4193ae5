"""Sampling parameters: vLLM's names and defaults, ranges, and fields that are refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from minivllm import SamplingParams
from minivllm.sampling_params import NOT_BUILT


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1, 1.0, 1.0, 0, 0.0,
    )  # fmt: skip
    assert params.max_tokens == 16 and params.seed is None and not params.ignore_eos
    assert params.stop == [] and params.stop_token_ids == []
    assert params.logprobs is None and params.prompt_logprobs is None
    assert params.detokenize and params.skip_special_tokens
    assert not params.include_stop_str_in_output and not params.greedy


GOOD: list[tuple[str, Any, Any]] = [
    ("n", 3, 3),
    ("temperature", 0, 0.0),
    ("temperature", 1e6, 1e6),
    ("top_p", 0, 0.0),
    ("top_p", 1, 1.0),
    ("top_p", 1e-30, 1e-30),
    ("top_k", -1, 0),  # off, as 0
    ("top_k", 10**9, 10**9),
    ("top_k", np.int64(5), 5),
    ("min_p", 1, 1.0),
    ("seed", 0, 0),
    ("seed", -(2**63), -(2**63)),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("seed", None, None),
    ("stop", "a", ["a"]),
    ("stop", ("a", "bc"), ["a", "bc"]),
    ("stop", None, []),
    ("stop", [], []),
    ("stop_token_ids", (1, np.int32(2)), [1, 2]),
    ("stop_token_ids", None, []),
    ("max_tokens", None, None),
    ("max_tokens", 1, 1),
    ("logprobs", 0, 0),
    ("prompt_logprobs", 5, 5),
]


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_accepted(name: str, value: Any, expected: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == expected and type(found) is type(expected)


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 1.0, "1", None, True)),
    *(("temperature", value) for value in (-0.1, NAN, INF, -INF, "1", None, True)),
    *(("top_p", value) for value in (-1e-9, 1.0001, NAN, INF, "1", None)),
    *(("top_k", value) for value in (-2, 1.5, "3", None, False)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, None)),
    *(("seed", value) for value in (1.5, "7", True, -(2**63) - 1)),
    *(("stop", value) for value in ("", ["a", ""], [1], [None], 5)),
    *(("stop_token_ids", value) for value in ([-1], [1.0], ["a"], [True], 5)),
    *(("max_tokens", value) for value in (0, -5, 1.0, "4", True)),
    *(("logprobs", value) for value in (-1, 1.5, True)),
    *(("prompt_logprobs", value) for value in (-1, 1.5)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        SamplingParams(**{name: value})


def test_the_value_and_the_limit_are_named() -> None:
    with pytest.raises(ValueError, match=r"top_p must be finite and in \[0.0, 1.0\], got 1.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        SamplingParams(max_tokens=0)


def test_greedy_below_the_limit() -> None:
    for temperature, greedy in ((0, True), (9.9e-6, True), (1e-5, False), (1, False)):
        assert SamplingParams(temperature=temperature).greedy is greedy


def test_misspelt_fields_are_named() -> None:
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=0)
    with pytest.raises(TypeError, match="'zzz'$"):
        SamplingParams(zzz=0)


ASKS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "bad_words": ["x"],
    "logit_bias": {1: 2.0},
    "allowed_token_ids": [1],
    "truncate_prompt_tokens": 4,
    "structured_outputs": object(),
    "guided_decoding": object(),
    "logits_processors": [len],
    "extra_args": {"a": 1},
    "spaces_between_special_tokens": False,
    "flat_logprobs": True,
    "best_of": 2,
    "output_kind": 1,
}


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_fields_that_are_not_built(name: str) -> None:
    """Refused where they ask for something; a value that asks for nothing is no error."""
    with pytest.raises(ValueError, match=f"{name}=.* is not built yet"):
        SamplingParams(**{name: ASKS[name]})
    for nothing in NOT_BUILT[name]:
        SamplingParams(**{name: nothing})


def test_no_field_is_both_built_and_refused() -> None:
    assert not set(NOT_BUILT) & set(inspect.signature(SamplingParams).parameters)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="a", detokenize=False)
    SamplingParams(detokenize=False)


def test_lists_are_copied() -> None:
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert params.stop == ["a"] and params.stop_token_ids == [1]


def test_equal_by_value() -> None:
    assert SamplingParams(seed=1, stop="a") == SamplingParams(seed=1, stop=["a"])
    assert SamplingParams(seed=1) != SamplingParams(seed=2)
    assert "seed=1" in repr(SamplingParams(seed=1))
