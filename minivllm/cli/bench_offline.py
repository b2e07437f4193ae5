"""`minivllm bench offline`: the standard run, or another set of requests.

Owns what this command prints; `minivllm.bench` measures. Serves chapters 13 and later.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from minivllm import bench
from minivllm.bench.shapes import SHAPES, shape_directory
from minivllm.bench.workload import WORKLOADS, Workload
from minivllm.cli import options
from minivllm.cli.loading import Timing
from minivllm.cli.text import check_writable, note, print_json
from minivllm.config import ModelConfig
from minivllm.hub import resolve_model

if TYPE_CHECKING:
    from minivllm.llm import LLM


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    engine = options.engine_options(args)
    spec = WORKLOADS[args.workload].changed(**options.workload_sizes(args))
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {args.repeat}")
    check_writable(args.json)
    with ExitStack() as stack:
        if args.model in SHAPES:
            path = stack.enter_context(shape_directory(args.model))
            engine.setdefault("load_format", "dummy")  # there are no weights to load
        else:
            path = resolve_model(args.model)
        model = ModelConfig.from_dir(path)
        workload = spec.build(model.vocab_size)
        # Long enough for the requests: a pool for the model's whole context may not fit a CPU.
        engine.setdefault("max_model_len", min(workload.longest, model.max_position))
        timing = Timing()
        llm = _load(str(path), engine, timing, args.model)
        _say(f"{workload.describe()}, on {llm.engine.runner.device}")
        results = bench.measure_repeats(llm, workload, args.repeat, progress=sys.stderr.isatty())
    best = bench.best_of(results)
    if args.json != "-":
        print(bench.table(results))
    if args.json:
        print_json(_as_json(args, llm, timing, results, best), args.json)
    return 0
