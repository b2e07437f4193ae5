"""`minivllm bench offline`: the standard run, or another set of requests.

Owns what this command prints; `minivllm.bench` measures.
"""

from __future__ import annotations

import argparse
import sys

from minivllm import bench
from minivllm.cli import options
from minivllm.cli.bench_options import (
    build_workload,
    load_engine,
    model_directory,
    workload_specs,
)
from minivllm.cli.loading import Timing
from minivllm.cli.text import check_writable, print_json
from minivllm.config import ModelConfig


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    engine = options.engine_options(args)
    specs = workload_specs(args)
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {args.repeat}")
    check_writable(args.json)
    timing = Timing()
    with model_directory(args.model, engine) as path:
        model = ModelConfig.from_dir(path)
        workload = build_workload(specs, engine, model)
        workload.params()  # a bad temperature is found before the model is loaded
        with timing.measure("import torch"):
            from minivllm.bench import offline
            from minivllm.bench.measure import device_of
        places = engine.get("device", "auto"), engine.get("dtype", "auto")
        ceilings = offline.measure_ceilings(model, *places)
        importing = timing.seconds["import torch"]  # `load` times it again, as nothing
        llm = load_engine(args.model, path, engine, timing)
        timing.seconds["import torch"] = importing
    # Flushed, and on stderr: what is about to take long is said before it starts.
    device = device_of(llm)
    print(f"{args.model} on {device}; {workload.describe()}", file=sys.stderr, flush=True)
    if device.type == "cpu" and workload.name == "standard":
        print("(sized for a GPU; `--workload mixed-32` suits a CPU)", file=sys.stderr, flush=True)
    results = bench.measure_repeats(llm, workload, args.repeat, progress=sys.stderr.isatty())
    record = offline.record(llm, workload, results, ceilings, timing.seconds)
    if args.json != "-":
        print(bench.table(results))
        print(offline.lines(record))
    if args.json:
        print_json({"model": args.model, **record}, args.json)
    return 0
