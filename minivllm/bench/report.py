"""Results as text for a terminal.

Owns the layout. Never computes more than a unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.bench.result import BenchResult, Latency


def table(results: Sequence[BenchResult]) -> str:
    """One column a repeat, the fastest marked; rows are what was measured."""
    best = max(results, key=lambda result: result.output_tokens_per_s)
    titles = [f"run {i}{' *' if r is best else ''}" for i, r in enumerate(results, 1)]
    rows = [("", titles), *((name, [show(r) for r in results]) for name, show in _ROWS)]
    width = max(len(name) for name, _ in rows)
    column = max(len(cell) for _, cells in rows for cell in cells)
    lines = [
        f"{name:<{width}}  " + "  ".join(f"{cell:>{column}}" for cell in cells)
        for name, cells in rows
    ]
    mark = "\n* the fastest" if len(results) > 1 else ""
    return "\n".join(line.rstrip() for line in lines) + mark


def _latency(value: Latency) -> str:
    return " / ".join(f"{1000 * x:,.1f}" for x in (value.mean, value.p50, value.p99))


_ROWS = (
    ("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.1f}"),
    ("seconds", lambda r: f"{r.seconds:,.2f}"),
    ("output tokens", lambda r: f"{r.output_tokens:,}"),
    ("prefill tokens/s", lambda r: f"{r.prefill_tokens_per_s:,.0f}"),
    ("decode tokens/s", lambda r: f"{r.decode_tokens_per_s:,.0f}"),
    ("TTFT, ms: mean / p50 / p99", lambda r: _latency(r.ttft)),
    ("inter-token, ms: mean / p50 / p99", lambda r: _latency(r.inter_token)),
    ("peak KV blocks", lambda r: f"{r.peak_blocks:,} of {r.num_blocks:,}"),
    ("peak KV, MiB", lambda r: f"{r.peak_kv_bytes / 2**20:,.1f} of {r.kv_bytes / 2**20:,.1f}"),
    ("tokens computed", lambda r: f"{r.tokens_computed:,}"),
    ("prefix cache hits, tokens", lambda r: f"{r.cached_tokens:,}"),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("steps", lambda r: f"{r.num_steps:,}"),
)
