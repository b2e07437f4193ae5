"""`minivllm bench latency` and `minivllm bench prefill`: sweeps over batch sizes and lengths.

Owns what these commands print; `minivllm.bench.latency` measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli import options
from minivllm.cli.bench_options import (
    BATCHES,
    CONTEXT,
    LENGTHS,
    limit_length,
    load_engine,
    longest_sequence,
    model_directory,
)
from minivllm.cli.loading import Timing
from minivllm.cli.text import check_writable, print_json
from minivllm.config import ModelConfig

if TYPE_CHECKING:
    from minivllm.bench.limit import Machine
    from minivllm.llm import LLM

Sweep = Callable[["LLM", "Machine"], list[dict[str, float]]]
# From the tokens that a sequence may have to those of the longest one measured, and its measuring:
# sizes nobody gave are those that fit.
Plan = Callable[[int], tuple[int, Sweep]]


def run(args: argparse.Namespace) -> int:
    """Run `bench latency`."""
    _check("--batch", args.batch or ())
    _check("--context", () if args.context is None else [args.context])
    _check("--tokens", [args.tokens])
    engine = options.engine_options(args)
    # No graph for a size nobody asked for.
    engine.setdefault("max_num_seqs", max(args.batch or BATCHES))

    def plan(limit: int) -> tuple[int, Sweep]:
        context = args.context or max(1, min(CONTEXT, limit - args.tokens - 1))

        def sweep(llm: LLM, machine: Machine) -> list[dict[str, float]]:
            from minivllm.bench.latency import fitting, sweep_batches

            batches = args.batch or fitting(llm, BATCHES, context, args.tokens) or BATCHES[:1]
            return sweep_batches(llm, machine, batches, context, args.tokens)

        return context + args.tokens + 1, sweep

    return _sweep(args, engine, plan)


def run_prefill(args: argparse.Namespace) -> int:
    """Run `bench prefill`."""
    _check("--length", args.length or ())
    engine = options.engine_options(args)

    def plan(limit: int) -> tuple[int, Sweep]:
        lengths = args.length or [n for n in LENGTHS if n < limit] or [max(1, limit - 1)]

        def sweep(llm: LLM, machine: Machine) -> list[dict[str, float]]:
            from minivllm.bench.latency import sweep_prompts
            from minivllm.bench.step_time import fits

            held = [length for length in lengths if fits(llm, [length])]
            return sweep_prompts(llm, machine, args.length or held or lengths[:1])

        return max(lengths) + 1, sweep  # and the token that comes with the prompt

    return _sweep(args, engine, plan)


def _sweep(args: argparse.Namespace, engine: dict[str, Any], plan: Plan) -> int:
    check_writable(args.json)
    timing = Timing()
    with model_directory(args.model, engine) as path:
        from minivllm.bench import offline
        from minivllm.bench.environment import stamp
        from minivllm.bench.measure import device_of, settings

        model = ModelConfig.from_dir(path)
        longest, sweep = plan(longest_sequence(engine, model))
        limit_length(engine, longest, model)
        places = engine.get("device", "auto"), engine.get("dtype", "auto")
        ceilings = offline.measure_ceilings(model, *places)
        llm = load_engine(args.model, path, engine, timing)
    rows = sweep(llm, offline.machine_of(llm, ceilings))
    if args.json != "-":
        print(_table(rows))
    if args.json:
        record = {
            "model": args.model,
            "environment": stamp(device_of(llm)),
            "settings": settings(llm),
            "roofline": ceilings.to_dict(),
            "rows": rows,
        }
        print_json(record, args.json)
    return 0


def _table(rows: Sequence[dict[str, float]]) -> str:
    """Columns named as in the JSON; three digits behind the point where there are any."""
    names = list(rows[0])
    cells = [names, *([_show(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells
    )


def _show(value: float) -> str:
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}"


def _check(flag: str, values: Sequence[int]) -> None:
    for value in values:
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
