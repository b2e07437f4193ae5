"""Results as text for a terminal.

Owns the layout. Never computes more than a unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.bench.result import BenchResult

WIDTH = 100


def table(results: Sequence[BenchResult]) -> str:
    """One column a repeat, the fastest marked; rows are what was measured.

    Repeats that do not stand beside each other in WIDTH characters stand below.
    """
    best = max(results, key=lambda result: result.output_tokens_per_s)
    titles = [f"run {i}{' *' if r is best else ''}" for i, r in enumerate(results, 1)]
    rows = [("", titles), *((name, [show(r) for r in results]) for name, show in _ROWS)]
    width = max(len(name) for name, _ in rows)
    column = max(len(cell) for _, cells in rows for cell in cells)
    count = max(1, (WIDTH - width) // (column + 2))
    lines = [
        f"{name:<{width}}  " + "  ".join(f"{cell:>{column}}" for cell in cells[i : i + count])
        for i in range(0, len(results), count)
        for name, cells in rows
    ]
    mark = "\n* the fastest" if len(results) > 1 else ""
    return "\n".join(line.rstrip() for line in lines) + mark


def _ms(value: float) -> str:
    return f"{1000 * value:,.1f}"


_ROWS = (
    ("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.1f}"),
    ("seconds", lambda r: f"{r.seconds:,.2f}"),
    ("output tokens", lambda r: f"{r.output_tokens:,}"),
    ("prefill tokens/s", lambda r: f"{r.prefill_tokens_per_s:,.0f}"),
    ("decode tokens/s", lambda r: f"{r.decode_tokens_per_s:,.0f}"),
    ("TTFT, ms: mean", lambda r: _ms(r.ttft.mean)),
    ("TTFT, ms: p50", lambda r: _ms(r.ttft.p50)),
    ("TTFT, ms: p99", lambda r: _ms(r.ttft.p99)),
    ("inter-token, ms: mean", lambda r: _ms(r.inter_token.mean)),
    ("inter-token, ms: p50", lambda r: _ms(r.inter_token.p50)),
    ("inter-token, ms: p99", lambda r: _ms(r.inter_token.p99)),
    ("peak KV blocks", lambda r: f"{r.peak_blocks:,} of {r.num_blocks:,}"),
    ("peak KV, MiB", lambda r: f"{r.peak_kv_bytes / 2**20:,.1f} of {r.kv_bytes / 2**20:,.1f}"),
    ("tokens computed", lambda r: f"{r.tokens_computed:,}"),
    ("prefix cache hits, tokens", lambda r: f"{r.cached_tokens:,}"),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("steps", lambda r: f"{r.num_steps:,}"),
)
