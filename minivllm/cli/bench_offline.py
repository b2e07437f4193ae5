"""`minivllm bench offline`: the standard run, or another set of requests.

Owns what this command prints; `minivllm.bench` measures.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from minivllm import bench
from minivllm.bench.measure import device_of
from minivllm.bench.shapes import SHAPES, shape_directory
from minivllm.cli import options
from minivllm.cli.loading import Prepared, Timing, load
from minivllm.cli.text import check_writable, print_json
from minivllm.config import ModelConfig
from minivllm.hub import resolve_model
from minivllm.sampling_params import SamplingParams


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    engine = options.engine_options(args)
    spec = bench.WORKLOADS[args.workload].changed(**options.workload_sizes(args))
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {args.repeat}")
    check_writable(args.json)
    timing = Timing()
    with ExitStack() as stack:
        if args.model in SHAPES:
            path = stack.enter_context(shape_directory(args.model))
            engine.setdefault("load_format", "dummy")  # a shape has no weights to load
        else:
            path = resolve_model(args.model)
        model = ModelConfig.from_dir(path)
        workload = spec.build(model.vocab_size)
        workload.params()  # a bad temperature is found before the model is loaded
        # Long enough for the requests: a pool for the model's whole context may not fit a CPU.
        engine.setdefault("max_model_len", min(workload.longest, model.max_position))
        llm = load(Prepared(args.model, path, SamplingParams(), engine), timing)
    # Flushed, and on stderr: what is about to take long is said before it starts.
    device = device_of(llm)
    print(f"{args.model} on {device}; {workload.describe()}", file=sys.stderr, flush=True)
    if device.type == "cpu" and args.workload == "standard" and args.num_requests is None:
        print("(sized for a GPU; `--workload mixed-32` suits a CPU)", file=sys.stderr, flush=True)
    results = bench.measure_repeats(llm, workload, args.repeat, progress=sys.stderr.isatty())
    if args.json != "-":
        print(bench.table(results))
    if args.json:
        record = {
            "model": args.model,
            "best": bench.best_of(results).to_dict(),
            "output_tokens_per_s": [result.output_tokens_per_s for result in results],
            "start_seconds": timing.seconds,
        }
        print_json(record, args.json)
    return 0
