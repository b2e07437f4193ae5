"""`minivllm bench compare-transformers`: two engines, one machine, a ratio.

Owns what this command prints; `minivllm.bench.compare` measures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from typing import TYPE_CHECKING

from minivllm.bench.workload import WORKLOADS
from minivllm.cli import options
from minivllm.cli.text import check_writable, note, print_json
from minivllm.config import ModelConfig
from minivllm.hub import resolve_model
from minivllm.progress import open_bar

if TYPE_CHECKING:
    from minivllm.bench.compare import Comparison


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    spec = WORKLOADS["compare-16"].changed(**options.workload_sizes(args))
    for flag in ("threads", "batch_size", "repeat"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
    check_writable(args.json)
    path = resolve_model(args.model)
    workload = spec.build(ModelConfig.from_dir(path).vocab_size)

    import torch

    from minivllm.bench.compare import compare

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    note("loading the model twice")
    with open_bar(4 * args.repeat, "Measured", "run", sys.stderr.isatty()) as bar:

        def told(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        result = compare(
            path, workload, batch_size=args.batch_size, repeats=args.repeat, progress=told
        )
    if args.json != "-":
        print(f"{args.model}, {workload.describe()}\ngreedy, float32, threads: {result.threads}")
        print(report(result))
    if args.json:
        print_json({"model": args.model, **result.to_dict()}, args.json)
    return 0


def report(result: Comparison) -> str:
    """Rates, ratios and agreement as text."""
    batches = f"batch ({result.num_requests} requests; transformers: padded {result.batch_size}s)"
    rows = [
        (batches, result.ours, result.theirs, result.ratio),
        ("one request", result.ours_single, result.theirs_single, result.ratio_single),
    ]
    width = max(len(name) for name, *_ in rows)
    lines = [f"{'useful tokens/s, median':<{width}}  minivllm  transformers   ratio"]
    for name, ours, theirs, ratio in rows:
        a, b = statistics.median(ours), statistics.median(theirs)
        lines.append(f"{name:<{width}}  {a:8.1f}  {b:12.1f}  {ratio:5.2f}x")
    lines.append(f"same greedy tokens: {result.num_agreeing} of {result.num_requests} requests")
    if result.first_differences:
        places = ", ".join(f"{k} at token {v}" for k, v in result.first_differences.items())
        lines += textwrap.wrap(f"requests that part: {places}", 100, subsequent_indent="  ")
    return "\n".join(lines)
