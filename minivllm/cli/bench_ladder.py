"""`minivllm bench ladder`: the same requests, with one trick more on each rung.

Owns what this command prints; `minivllm.bench.engine_ladder` measures.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from minivllm.cli import options
from minivllm.cli.bench_options import (
    build_workload,
    load_engine,
    model_directory,
    workload_specs,
)
from minivllm.cli.loading import Timing
from minivllm.cli.text import check_writable, note, print_json
from minivllm.config import ModelConfig

if TYPE_CHECKING:
    from minivllm.llm import LLM


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    given = options.engine_options(args)
    taken = sorted(given.keys() & {"attention_backend", "enforce_eager", "kv_cache_dtype"})
    if taken:
        raise ValueError(f"the rungs of the ladder set {', '.join(taken)} themselves")
    specs = workload_specs(args)
    check_writable(args.json)
    with model_directory(args.model, given) as path:
        from minivllm.bench import engine_ladder
        from minivllm.bench.environment import stamp
        from minivllm.engine.device import pick_device

        model = ModelConfig.from_dir(path)
        workload = build_workload(specs, given, model)
        device = pick_device(given.get("device", "auto"))

        def build(extra: dict[str, Any]) -> LLM:
            return load_engine(args.model, path, {**given, **extra}, Timing())

        results = engine_ladder.climb(build, workload, device.type, note)
    if args.json != "-":
        width = max(len(result.settings["stage"]) for result in results)
        for result in results:
            print(
                f"{result.settings['stage']:<{width}}  {result.output_tokens_per_s:10,.1f} output "
                f"tokens/s  ({result.num_requests} requests)"
            )
    if args.json:
        runs = [result.to_dict() for result in results]
        record = {"model": args.model, "environment": stamp(device), "runs": runs}
        print_json(record, args.json)
    return 0
