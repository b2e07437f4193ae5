"""Records the stages and the engine once on a GPU: `python -m minivllm.bench.record_stages`.

Owns the recipe of `lessons/data/stages.json`, which lessons plot beside the run on the reader's own
CPU. Three parts: the ladder on the tiny model; milliseconds a token against length, on the shape of
a published model with random weights, because a tiny model on a large GPU measures launches only;
the machine's two ceilings for the roofline chart. Run it on an idle machine; takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from minivllm import bench, stages
from minivllm.bench.environment import stamp
from minivllm.bench.ladder import RECORD
from minivllm.bench.roofline import ceilings
from minivllm.bench.shapes import shape_directory
from minivllm.engine.device import pick_device

SHAPE = "smollm2-135m-shape"
LENGTHS = (64, 512, 1024, 2048, 3072, 4096)


def main(argv: list[str] | None = None) -> int:
    """Measure and write the record; its path is printed."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.bench.record_stages")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="tiny", help="the ladder's model")
    parser.add_argument("--workload", default="ladder")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--shape", default=SHAPE, help="for the latency curves; random weights")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args(argv)
    try:
        device = pick_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    record: dict[str, Any] = {
        "environment": stamp(device),
        "runs": ladder_runs(args),
        "latency": latency_curves(args),
        "roofline": ceilings(device).to_dict(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(args.out)
    return 0


def ladder_runs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each stage on the ladder's workload; all must write the same."""
    runs = []
    for name in stages.NAMES:
        stage = _build(name, args.model, args.device, max_len=256)
        result = bench.run(stage, args.workload, repeats=args.repeats)
        print(f"{name}: {result.output_tokens_per_s:,.0f} tokens/s", file=sys.stderr)
        runs.append(result.to_dict())
        del stage  # before the next one asks how much memory is free
    return runs


def latency_curves(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a token behind texts of each length, for each stage."""
    curves: dict[str, list[float]] = {}
    max_len = max(args.lengths) + 32
    with _shape(args.shape) as path:
        for name in stages.NAMES:
            stage = _build(name, str(path), args.device, max_len, load_format="dummy")
            # The best: a step of single launches takes as long as the host lets it.
            passes = [bench.token_latency(stage, args.lengths) for _ in range(args.repeats)]
            curves[name] = [min(times) for times in zip(*passes, strict=True)]
            print(name, [f"{1e3 * x:.2f} ms" for x in curves[name]], file=sys.stderr)
            del stage
    return {"model": args.shape, "lengths": list(args.lengths), "seconds": curves}


def _shape(name: str) -> AbstractContextManager[Path]:
    """A directory of config.json: one of our own, or that of a known shape."""
    return nullcontext(Path(name)) if Path(name).is_dir() else shape_directory(name)


def _build(name: str, model: str, device: str, max_len: int, **options: Any) -> Any:
    if name == "engine":
        # Room for what is measured and no more: the record shows memory too.
        options["num_kvcache_blocks"] = max(64, max_len // 16 + 1)
        options["max_num_seqs"] = 8  # the ladder has six requests; each size is a graph to capture
    return stages.build(name, model, device=device, max_len=max_len, **options)


if __name__ == "__main__":
    sys.exit(main())
