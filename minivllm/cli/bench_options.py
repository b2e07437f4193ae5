"""Options of the `minivllm bench` commands, and the way from them to a loaded engine.

Owns what these commands share: a model or a shape by name, sizes, the JSON file. Never imports
torch before a command's flags have been checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.shapes import SHAPES, shape_directory
from minivllm.bench.workload import WORKLOADS, Workload, WorkloadSpec
from minivllm.cli import options
from minivllm.cli.loading import Prepared, Timing, load
from minivllm.config import ModelConfig
from minivllm.hub import resolve_model
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM

BATCHES = [1, 2, 4, 8, 16, 32, 64]
CONTEXT = 512
LENGTHS = [128, 512, 1024, 2048, 4096, 8192]
SMALL = "mixed-32"  # taken where a command's own workload is too long for the model
# What `minivllm.bench.limit` computes; here, because that imports torch and --help must not.
FORMULA = """roofline: per decode step max(bytes / bandwidth, flops / rate), with bytes = weights of
the layers and the output head + KV bytes a token x sum of contexts (an fp8 cache counts its own
bytes, scales included); plus prefill flops / rate. Bandwidth and matrix rate are measured in
the same run; all requests are counted as decoding together from the start."""


def add_shape(parser: argparse.ArgumentParser) -> None:
    """--model, which may be a shape, --verbose and --json."""
    parser.add_argument(
        "--model",
        default="qwen3-0.6b-shape",
        metavar="NAME",
        help=f"a model, or a shape with random weights: {', '.join(SHAPES)} (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="say what the engine decides")
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is stdout")


def add_workload(parser: argparse.ArgumentParser, default: str) -> None:
    """--workload and the sizes that change it."""
    parser.set_defaults(default_workload=default)
    parser.add_argument(
        "--workload",
        choices=sorted(WORKLOADS),
        help=f"named set of sizes (default: {default}, or {SMALL} where that is too long for the "
        "model); the options below change single ones",
    )
    options.add_sizes(parser)
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the workload's")


def add_offline(parser: argparse.ArgumentParser) -> None:
    """The options of `bench offline`."""
    add_shape(parser)
    add_workload(parser, "standard")
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="default: 3, best counts"
    )
    options.add_engine(parser)


def add_latency(parser: argparse.ArgumentParser) -> None:
    """The options of `bench latency`."""
    add_shape(parser)
    parser.add_argument(
        "--batch", type=int, nargs="+", metavar="N", help="default: 1 2 4 ... 64, as many as fit"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens of a prompt (default: {CONTEXT}, or what the model takes)",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="tokens to time (default: 64)"
    )
    options.add_engine(parser)


def add_prefill(parser: argparse.ArgumentParser) -> None:
    """The options of `bench prefill`."""
    add_shape(parser)
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        metavar="N",
        help=f"default: those of {' '.join(map(str, LENGTHS))} that the model takes",
    )
    options.add_engine(parser)


def add_ladder(parser: argparse.ArgumentParser) -> None:
    """The options of `bench ladder`."""
    add_shape(parser)
    add_workload(parser, "short")
    options.add_engine(parser)


def add_compare(parser: argparse.ArgumentParser) -> None:
    """The options of `bench compare-transformers`."""
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="default: %(default)s")
    options.add_sizes(parser)
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="of transformers (default: 8)"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3, median")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch, for both")
    add_json(parser)


def add_kv_accuracy(parser: argparse.ArgumentParser) -> None:
    """The options of `bench kv-accuracy`."""
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="longest text (default: 64)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of torch")
    add_json(parser)


@contextmanager
def model_directory(name: str, engine: dict[str, Any]) -> Iterator[Path]:
    """The directory of a model or a shape; a shape has no weights to load, and says so."""
    if name not in SHAPES:
        yield resolve_model(name)
        return
    engine.setdefault("load_format", "dummy")
    with shape_directory(name) as path:
        yield path


def workload_specs(args: argparse.Namespace) -> list[WorkloadSpec]:
    """What may be run, the first choice first: a workload that was asked for is the only one."""
    names = [args.workload] if args.workload else [args.default_workload, SMALL]
    return [WORKLOADS[name].changed(**options.workload_sizes(args)) for name in names]


def build_workload(
    specs: Sequence[WorkloadSpec], engine: dict[str, Any], model: ModelConfig
) -> Workload:
    """The first that fits the model, or just the first; makes the engine long enough for it."""
    built = [spec.build(model.vocab_size) for spec in specs]
    limit = longest_sequence(engine, model)
    workload = next((load for load in built if load.longest <= limit), built[0])
    limit_length(engine, workload.longest, model)
    return workload


def longest_sequence(engine: dict[str, Any], model: ModelConfig) -> int:
    """Tokens that a sequence may have: the option's, or what the model takes."""
    limits = (engine.get("max_model_len"), model.max_position, model.sliding_window)
    return min(limit for limit in limits if limit is not None)


def limit_length(engine: dict[str, Any], longest: int, model: ModelConfig) -> None:
    """Long enough for the requests: a pool for the model's whole context may not fit a CPU.

    Raises ValueError, before anything is loaded, where they are longer than may be.
    """
    limit = longest_sequence(engine, model)
    if longest > limit:
        raise ValueError(
            f"the longest request has {longest} tokens, output included, and a sequence may have "
            f"{limit}"
        )
    engine.setdefault("max_model_len", longest)


def load_engine(name: str, path: Path, engine: dict[str, Any], timing: Timing) -> LLM:
    """Import torch and load, timed."""
    return load(Prepared(name, path, SamplingParams(), engine), timing)
