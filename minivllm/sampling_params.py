"""How one request's tokens are chosen and when it ends: vLLM's fields and defaults.

Owns the range check of every field. A field of vLLM's that is not built is refused by name, so that
a script ported from vLLM never runs with an option silently ignored. Never imports torch.
Lesson 01.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

# vLLM's fields that are not built, with the value that asks for nothing.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "bad_words": (None, []),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "extra_args": (None,),
    "spaces_between_special_tokens": (True,),
    "flat_logprobs": (False,),
    "best_of": (None, 1),
    "output_kind": (None,),
}
# Below this a temperature means greedy, as in vLLM: the best token wins by more than any noise can
# make up (unless logits agree to a few times 1e-5), and logits / T would only overflow.
GREEDY_TEMPERATURE = 1e-5


@dataclass(init=False, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature: 0 is greedy (ties: lowest id). top_k: 0 or -1 is off, as is k >= vocabulary.
    top_p in [0, 1]: 0 keeps only the most likely token. min_p in [0, 1], relative to the most
    likely token. seed: fixes the tokens whatever shares the batch. stop: strings, cut from the text
    but kept in token_ids. logprobs and prompt_logprobs: how many top entries per token (0: only the
    token's own). Raises TypeError or ValueError that names the field.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool

    def __init__(
        self,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        **other: Any,
    ) -> None:
        _refuse_unbuilt(other)
        self.n = _integer("n", n, low=1)
        self.temperature = _number("temperature", temperature, 0.0, math.inf)
        self.top_p = _number("top_p", top_p, 0.0, 1.0)
        self.top_k = max(_integer("top_k", top_k, low=-1), 0)
        self.min_p = _number("min_p", min_p, 0.0, 1.0)
        self.seed = None if seed is None else _integer("seed", seed, low=-(2**63))
        self.stop = _stop_strings(stop)
        self.stop_token_ids = _stop_ids(stop_token_ids)
        self.ignore_eos = bool(ignore_eos)
        self.max_tokens = None if max_tokens is None else _integer("max_tokens", max_tokens, low=1)
        self.logprobs = None if logprobs is None else _integer("logprobs", logprobs, low=0)
        self.prompt_logprobs = (
            None if prompt_logprobs is None else _integer("prompt_logprobs", prompt_logprobs, low=0)
        )
        self.detokenize = bool(detokenize)
        self.skip_special_tokens = bool(skip_special_tokens)
        self.include_stop_str_in_output = bool(include_stop_str_in_output)
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")

    @property
    def greedy(self) -> bool:
        """True where the temperature asks for the most likely token."""
        return self.temperature < GREEDY_TEMPERATURE


def _refuse_unbuilt(other: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(SamplingParams).parameters if name != "other"]
    for name, value in other.items():
        if name not in NOT_BUILT:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"SamplingParams() has no field {name!r}{hint}")
        if value not in NOT_BUILT[name]:
            raise ValueError(f"SamplingParams field {name}={value!r} is not built yet")


def _integer(name: str, value: object, low: int) -> int:
    # bool is an int in Python, and numpy's integers are not: __index__ takes the right ones.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    number = value.__index__()
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    return int(number)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not (low <= value <= high) or math.isinf(value):  # a NaN fails every comparison
        raise ValueError(f"{name} must be finite and in [{low}, {high}], got {value}")
    return float(value)


def _stop_ids(ids: Sequence[int] | None) -> list[int]:
    if not isinstance(ids, Iterable) and ids is not None:
        raise ValueError(f"stop_token_ids must be a list of integers, got {ids!r}")
    return [_integer("stop_token_ids", token, low=0) for token in ids or ()]


def _stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    if not isinstance(stop, Iterable) and stop is not None:
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    for text in strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must hold non-empty strings, got {text!r}")
    return strings
