"""The engine's own ladder: one workload, one trick more on each rung.

Owns the rungs and their order; `ladder` has the rungs of the course's stages. Results are those of
`bench.run` with `settings["stage"]` naming the rung, so that lessons read both files alike.
Lessons 12, 13 and 15.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.bench import measure
from minivllm.bench.result import BenchResult
from minivllm.bench.workload import Workload

if TYPE_CHECKING:
    from minivllm.llm import LLM

# torch's decode attention is a loop over the rows: its speed does not grow with them, and the
# whole workload would take it minutes.
TORCH_REQUESTS, TORCH_TOKENS = 8, 64


@dataclass(frozen=True, slots=True)
class Rung:
    """A name, what the engine is built with, and how it is then run."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    graphs: bool = True
    depth: int = 1
    most_requests: int | None = None
    most_tokens: int | None = None  # of each request's output
    repeats: int = 2


def rungs(device: str) -> tuple[Rung, ...]:
    """The rungs that a device has: a CPU captures no graphs, and its fast form is `sdpa`."""
    torch_rung = Rung(
        "torch eager",
        {
            "attention_backend": "torch",
            "enforce_eager": True,
            "max_num_seqs": TORCH_REQUESTS,
        },
        graphs=False,
        depth=0,
        most_requests=TORCH_REQUESTS,
        most_tokens=TORCH_TOKENS,
        repeats=1,
    )
    fp8 = Rung("+ fp8 KV", {"kv_cache_dtype": "fp8"})
    # Its attention is torch's loop too. Twice: the first run compiles what the warm-up had not.
    compiled = dataclasses.replace(
        torch_rung,
        name="compile",
        options={**torch_rung.options, "attention_backend": "compile"},
        repeats=2,
    )
    if device == "cpu":
        return (torch_rung, Rung("sdpa eager", depth=0), Rung("+ overlap"), fp8)
    return (
        torch_rung,
        compiled,
        Rung("triton eager", graphs=False, depth=0, repeats=1),
        Rung("+ graphs", depth=0),
        Rung("+ overlap"),
        fp8,
    )


def climb(
    build: Callable[[dict[str, Any]], LLM],
    workload: Workload,
    device: str,
    progress: Callable[[str], None] = lambda text: None,
) -> list[BenchResult]:
    """Measure every rung. build: engine options -> an engine; rungs of equal options share one."""
    results: list[BenchResult] = []
    llm, built_with = None, None
    for rung in rungs(device):
        if llm is None or rung.options != built_with:
            # Nothing may hold the old one: the next asks how much memory is free.
            llm = None
            llm, built_with = build(rung.options), rung.options
        results.append(measure_rung(llm, rung, workload))
        progress(f"{rung.name}: {results[-1].output_tokens_per_s:,.0f} tokens/s")
    return results


def measure_rung(llm: LLM, rung: Rung, workload: Workload) -> BenchResult:
    """One rung on a built engine, which is afterwards as before."""
    most, longest = rung.most_requests, rung.most_tokens or workload.longest
    workload = dataclasses.replace(
        workload,
        prompts=workload.prompts[:most],
        output_lens=[min(length, longest) for length in workload.output_lens[:most]],
    )
    with _as_on(llm, rung):
        result = measure.run(llm, workload, rung.repeats)
        graphs = getattr(llm.engine.runner, "graphs", None) is not None
    settings = {"stage": rung.name, **result.settings, "graphs": graphs}
    return dataclasses.replace(result, settings=settings)


@contextmanager
def _as_on(llm: LLM, rung: Rung) -> Iterator[None]:
    runner: Any = llm.engine.runner
    depth, graphs = llm.engine.depth, runner.graphs
    try:
        llm.engine.depth = rung.depth
        if not rung.graphs:
            runner.graphs = None
        yield
    finally:
        llm.engine.depth, runner.graphs = depth, graphs
