"""A student's units inside the engine or a stage, compared with the program's own.

Owns the run (greedy tokens and logits of a few prompts) and the comparison. Call counters prove
that a given unit was used; nothing is patched. Lesson 02 onwards, `--engine`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from minivllm import LLM, SamplingParams
from minivllm.course.table import Task
from minivllm.ops.sampling import sample
from minivllm.stages.build import USED, Stage

PROMPTS = (
    "Once upon a time, there was a little cat. She",
    "Tom saw a big dog in the park. The dog",
    "One day",
)
MAX_TOKENS = 24
MAX_LEN = 128  # of a stage's sequences
SAMPLED: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 8,
    "top_p": 0.85,
    "seed": 1,
}  # each of them must matter
TOLERANCE = 1e-4  # of logits, float32 on a CPU
LOOPS = ("generate_naive", "generate_cached")  # units that call a model until they have enough


@dataclass(frozen=True)
class Trace:
    """What a program wrote, and the logits behind each token."""

    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    steps: tuple[torch.Tensor, ...]  # one [rows, V] a sampling step


def program_of(task: Task) -> str:
    """Where a task's seat is: "engine", or the latest stage that runs on the unit."""
    if task.seat.partition(":")[0] != "stage":
        return "engine"
    using = [stage for stage, names in USED.items() if task.name in names]
    if not using:
        raise ValueError(f"{task.id}: no stage runs on {task.name!r} (seat {task.seat!r})")
    return using[-1]


def run_program(program: str, model: str, units: Mapping[str, Any]) -> Trace:
    """Run "engine" or a stage with `units` in their seats. Raises what a unit raises.

    RuntimeError names a unit that no call reached.
    """
    if program == "engine":
        return run_engine(model, units)
    return run_stage(program, model, units)


def run_engine(model: str, parts: Mapping[str, Any]) -> Trace:
    """Generate greedily with `parts` in the engine. Raises what a part raises.

    A part that no call reached is the engine's RuntimeError.
    """
    steps: list[torch.Tensor] = []

    def recording_sample(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        steps.append(logits.detach().clone())
        return sample(logits, *args, **kwargs)

    # The sampler is the one place where all logits pass, so it is where they are kept. A unit of
    # that name (lesson 01 has none in this seat) would be recorded by itself.
    llm = LLM(model, device="cpu", parts={"sample": recording_sample, **parts})
    # A fixed length: the end token may come early in a wrong program and hide what follows.
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return Trace(
        prompts=PROMPTS,
        tokens=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        texts=tuple(output.outputs[0].text for output in outputs),
        steps=tuple(steps),
    )


def run_stage(name: str, model: str, units: Mapping[str, Any]) -> Trace:
    """The same on an earlier stage, which takes token ids; greedy, and then sampled."""
    calls = dict.fromkeys(units, 0)
    counted = {key: _counted(value, key, calls) for key, value in units.items()}
    counted |= {key: _ending(counted[key]) for key in LOOPS if key in counted}
    stage = Stage(name, model, MAX_LEN, counted, device="cpu")
    vocab = stage.model.config.vocab_size
    prompts = [[(17 * i + 5) % vocab for i in range(length)] for length in (13, 5, 1)]
    tokens = stage.generate(prompts, MAX_TOKENS) + stage.sample(prompts, MAX_TOKENS, **SAMPLED)
    logits = [stage.model(torch.tensor([ids]))[0] for ids in prompts]
    unused = [key for key, count in calls.items() if count == 0]
    if unused:
        raise RuntimeError(f"the stage {name} was run and never called {', '.join(unused)}")
    shown = [tuple(" ".join(map(str, ids)) for ids in lists) for lists in (prompts * 2, tokens)]
    return Trace(shown[0], tuple(tuple(ids) for ids in tokens), shown[1], tuple(logits))


def _ending(loop: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """A decode loop whose model raises TimeoutError when it is called far too often."""

    @wraps(loop)
    def run(model: Callable[..., torch.Tensor], *args: Any) -> list[int]:
        tokens = args[-2]  # (cache,) ids, max_new, eos_ids
        calls = 0

        def limited(*inputs: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            # Work that is merely wasted is no endless loop: twice the calls still end.
            if calls > 3 * tokens + 10:
                raise TimeoutError(f"called {calls} times for {tokens} tokens: does the loop end?")
            return model(*inputs)

        return loop(limited, *args)

    return run


def _counted(value: Any, key: str, calls: dict[str, int]) -> Any:
    """`value`, counting its calls; of a class, the calls of its own methods."""
    if isinstance(value, type):
        methods = {
            name: _counted(item, key, calls)
            for name, item in vars(value).items()
            if inspect.isfunction(item)
        }
        return type(value.__name__, (value,), methods)

    @wraps(value)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[key] += 1
        return value(*args, **kwargs)

    return call


def deviation(actual: Trace, expected: Trace) -> str:
    """Where and by how much a program departs; empty if it writes the same from the same logits."""
    for step, (a, e) in enumerate(zip(actual.steps, expected.steps)):
        if a.shape != e.shape:
            return f"step {step} has logits {list(a.shape)}, expected {list(e.shape)}"
        error = (a - e).abs().max().item()
        # Written so that NaN fails too.
        if not error <= TOLERANCE:
            return f"logits of step {step} differ by {error:.2g}, allowed {TOLERANCE:.0e}" + (
                _texts(actual, expected)
            )
    if len(actual.steps) != len(expected.steps):
        return f"{len(actual.steps)} steps, expected {len(expected.steps)}"
    return "" if actual.tokens == expected.tokens else f"other tokens{_texts(actual, expected)}"


def opening(trace: Trace) -> str:
    """The start of the first text that was written (of a stage: of the token ids)."""
    return _short(trace.texts[0])


def _texts(actual: Trace, expected: Trace) -> str:
    """The first prompt whose text changed, both ways."""
    for prompt, a, e in zip(actual.prompts, actual.texts, expected.texts):
        if a != e:
            return f"\nit wrote    {prompt!r} {_short(a)}\nexpected    {_short(e)}"
    return "\nthe text happens to be the same"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
