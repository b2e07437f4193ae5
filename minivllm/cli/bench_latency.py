"""`minivllm bench latency` and `minivllm bench prefill`: sweeps over batch sizes and lengths.

Owns what these commands print; `minivllm.bench.latency` measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.cli import options
from minivllm.cli.bench_options import limit_length, load_engine, model_directory
from minivllm.cli.loading import Timing
from minivllm.cli.text import check_writable, print_json
from minivllm.config import ModelConfig

if TYPE_CHECKING:
    from minivllm.bench.limit import Machine
    from minivllm.llm import LLM

Sweep = Callable[["LLM", "Machine"], list[dict[str, float]]]


def run(args: argparse.Namespace) -> int:
    """Run `bench latency`."""
    _check("--batch", args.batch)
    _check("--context", [args.context])
    _check("--tokens", [args.tokens])
    engine = options.engine_options(args)
    engine.setdefault("max_num_seqs", max(args.batch))  # no graph for a size nobody asked for

    def sweep(llm: LLM, machine: Machine) -> list[dict[str, float]]:
        from minivllm.bench.latency import sweep_batches

        return sweep_batches(llm, machine, args.batch, args.context, args.tokens)

    return _sweep(args, engine, args.context + args.tokens + 1, sweep)


def run_prefill(args: argparse.Namespace) -> int:
    """Run `bench prefill`."""
    _check("--length", args.length)
    engine = options.engine_options(args)

    def sweep(llm: LLM, machine: Machine) -> list[dict[str, float]]:
        from minivllm.bench.latency import sweep_prompts

        return sweep_prompts(llm, machine, args.length)

    return _sweep(args, engine, max(args.length) + 1, sweep)


def _sweep(args: argparse.Namespace, engine: dict[str, Any], longest: int, sweep: Sweep) -> int:
    check_writable(args.json)
    timing = Timing()
    with model_directory(args.model, engine) as path:
        from minivllm.bench import offline
        from minivllm.bench.environment import stamp
        from minivllm.bench.measure import device_of, settings

        model = ModelConfig.from_dir(path)
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
