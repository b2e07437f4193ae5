"""Measuring an engine: workloads, results, and the comparison with transformers.

    from minivllm import LLM, bench
    result = bench.run(LLM("smollm2"), workload="mixed-32")
    print(result.output_tokens_per_s, result.ttft.p50, result.peak_kv_bytes)

Owns nothing itself. Lessons use `run`; `minivllm bench` is built on the same parts. Names are
imported on first use: `minivllm --help` asks for the workloads and must not wait for NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.bench.measure import best_of as best_of
    from minivllm.bench.measure import measure_repeats as measure_repeats
    from minivllm.bench.report import table as table
    from minivllm.bench.result import BenchResult as BenchResult
    from minivllm.bench.result import Latency as Latency
    from minivllm.bench.stages import run as run
    from minivllm.bench.stages import token_latency as token_latency
    from minivllm.bench.workload import WORKLOADS as WORKLOADS
    from minivllm.bench.workload import Workload as Workload
    from minivllm.bench.workload import WorkloadSpec as WorkloadSpec

_MODULES = {
    "run": "stages",
    "token_latency": "stages",
    "measure_repeats": "measure",
    "best_of": "measure",
    "table": "report",
    "BenchResult": "result",
    "Latency": "result",
    "WORKLOADS": "workload",
    "Workload": "workload",
    "WorkloadSpec": "workload",
}
__all__ = [
    "WORKLOADS",
    "BenchResult",
    "Latency",
    "Workload",
    "WorkloadSpec",
    "best_of",
    "measure_repeats",
    "run",
    "table",
    "token_latency",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'minivllm.bench' has no attribute {name!r}")
    return getattr(import_module(f"minivllm.bench.{_MODULES[name]}"), name)
