"""Times every GPU kernel at the shapes of Qwen3-0.6B, against the limit that binds it.

Owns the measuring of kernels alone: CUDA graphs of calls over rotating inputs, so that neither
launches nor the L2 cache are what is measured; medians of replays. Never builds an engine.
`minivllm bench kernels`, or `python -m minivllm.bench.kernels [file.json]`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from minivllm.bench.environment import stamp
from minivllm.bench.workload import WORKLOADS
from minivllm.engine.step_plan import RowSampling
from minivllm.kernels import activations, decode, linear, norms, prefill, qkv, sampling
from minivllm.ops import kv_fp8
from minivllm.ops.sampling import SamplingBatch

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 1024, 3072, 151936, 28
HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16
PRODUCTS = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
REPEATS = 9
STEPS = (1, 148, 400, 700, 900, 1000)  # decode steps of the standard run: 256 rows down to 4


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel at one shape. `share` is that of the limit: of bandwidth, or of matrix rate."""

    kernel: str
    shape: str
    us: float
    bytes: float = 0.0
    flops: float = 0.0
    share: float = 0.0
    host_us: float | None = None

    def line(self) -> str:
        """A row of the printed table."""
        value, unit = (self.flops, "TFLOP/s") if self.flops else (self.bytes, "TB/s")
        host = "" if self.host_us is None else f"  host {self.host_us:.0f} us"
        rate = f"{value / self.us / 1e6:7.2f} {unit:7s} {self.share:5.0%}"
        return f"{self.kernel:28s} {self.shape:20s} {self.us:9.2f} us {rate}{host}"


def replay(calls: Sequence[Callable[[], object]], launches: int = 128) -> float:
    """Median microseconds of one of `calls`, captured together, `launches` at least, and replayed.

    A replay takes a slow host 80 us to launch. An untimed one keeps the device busy meanwhile, if
    it is long enough: eight kernels of 1.5 us, launched when the device was idle, looked like 4 us.
    """
    for call in calls:  # compiles
        call()
    rounds = -(-launches // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (*calls,) * rounds:
            call()
    times = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls) / rounds)
    return statistics.median(times[2:])


def host_time(call: Callable[[], object], repeats: int = 100) -> float:
    """Microseconds that Python spends on one launch."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / repeats * 1e6


def bandwidth() -> float:
    """Bytes a second of reading: a sum over 8 GB."""
    data = torch.ones(2**31, dtype=torch.float32, device="cuda")
    return data.numel() * 4 / (replay([lambda: data.sum()], 1) * 1e-6)


def matrix_rate() -> float:
    """bfloat16 operations a second of a product of 8192^3, on random numbers."""
    a, b = (_randn(8192, 8192) for _ in range(2))
    return 2 * 8192**3 / (replay([lambda: a @ b], 1) * 1e-6)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def contexts(step: int) -> list[int]:
    """Context lengths at a decode step of the standard run, longest first."""
    workload = WORKLOADS["standard"].build(VOCAB)
    pairs = zip(workload.prompts, workload.output_lens)
    return sorted((len(prompt) + step for prompt, length in pairs if length > step), reverse=True)


def _tables(lengths: Sequence[int], blocks: int, sets: int) -> list[torch.Tensor]:
    """Block tables over disjoint random blocks, as many of `sets` as fit the pool."""
    needed = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(blocks).tolist()
    found = []
    for _ in range(max(1, min(sets, blocks // sum(needed)))):
        table = torch.full((len(lengths), -(-max(needed) // 16) * 16), -1, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        found.append(table.cuda())
    return found


def time_decode() -> Iterator[Timing]:
    """Paged decode attention at real context vectors, 16 and 8 bits wide."""
    blocks = 24000
    k, v = _randn(blocks, BLOCK, KV_HEADS, DIM), _randn(blocks, BLOCK, KV_HEADS, DIM)
    (k8, k_scale), (v8, v_scale) = kv_fp8.quantize(k), kv_fp8.quantize(v)
    both: dict[str, tuple[torch.Tensor, ...]] = {"": (k, v), " fp8": (k8, v8, k_scale, v_scale)}
    cases = [(f"step {step}", contexts(step)) for step in STEPS]
    for name, lengths in [*cases, ("context 512", [512])]:
        tables, rows = _tables(lengths, blocks, 4), len(lengths)
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        q = _randn(rows, HEADS, DIM)
        size = sum(lengths) * KV_HEADS * 2
        for kind, caches in both.items():
            attend = partial(decode.paged_decode, context_lens=lens, scale=DIM**-0.5)
            extra = dict(zip(("k_scale", "v_scale"), caches[2:]))
            calls = [partial(attend, q, *caches[:2], table, **extra) for table in tables]
            width = sum(cache[0, 0, 0].nbytes for cache in caches) // 2  # of a token and head
            yield Timing(f"paged_decode{kind}", f"{name}, {rows} rows", replay(calls), size * width)


def time_products() -> Iterator[Timing]:
    """The four products of a layer and the output head, and cuBLAS beside them."""
    shapes = {**PRODUCTS, "lm_head": (VOCAB, HIDDEN)}
    for rows in (1, 16, 64, 256):
        layer = {"linear": 0.0, "cublas": 0.0}
        for name, (features, size) in shapes.items():
            copies = 2 if name == "lm_head" else LAYERS
            weights = [linear.prepare_weight(_randn(features, size) * 0.02) for _ in range(copies)]
            x = _randn(rows, size)
            for kind, product in (("linear", linear.linear), ("cublas", F.linear)):
                us = replay([partial(product, x, weight, None) for weight in weights])
                layer[kind] += us if name in PRODUCTS else 0
                yield Timing(f"{kind} {name}", f"{rows} rows", us, features * size * 2)
        size = sum(n * k for n, k in PRODUCTS.values()) * 2
        yield from (Timing(f"{kind} layer", f"{rows} rows", us, size) for kind, us in layer.items())


def time_small() -> Iterator[Timing]:
    """Norms, activation, and the fused q/k-norm, rotation and store; with the host's time."""
    for rows in (1, 256, 8192):
        sets = [_small_calls(rows) for _ in range(8)]  # at 8192 rows far more than the L2 cache
        for name, (call, width) in sets[0].items():
            us = replay([calls[name][0] for calls in sets])
            yield Timing(name, f"{rows} rows", us, rows * width, host_us=host_time(call))


def _small_calls(rows: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> (call on inputs of its own, bytes it must move for a row)."""
    weight, head_weight = _randn(HIDDEN), _randn(DIM)
    cos, sin = torch.randn(2, rows, DIM // 2, device="cuda")
    cache = torch.zeros(2, 1024, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(1024 * BLOCK, device="cuda")[:rows]
    positions = torch.arange(rows, device="cuda")
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    parts = [part.unflatten(-1, (-1, DIM)) for part in _randn(rows, sum(sizes)).split(sizes, -1)]
    shared = (head_weight, head_weight, 1e-6, positions, cos, sin, *cache, slots)
    x, residual = _randn(rows, HIDDEN), _randn(rows, HIDDEN)
    return {
        "rms_norm": (partial(norms.rms_norm, x, weight, 1e-6), 4 * HIDDEN),
        "add_rms_norm": (partial(norms.add_rms_norm, x, residual, weight, 1e-6), 8 * HIDDEN),
        "silu_mul": (
            partial(activations.silu_mul, _randn(rows, 2 * INTERMEDIATE)),
            6 * INTERMEDIATE,
        ),
        "qk_norm_rope_store": (partial(qkv.qk_norm_rope_store, *parts, *shared), 4 * sum(sizes)),
    }


def time_sampling() -> Iterator[Timing]:
    """The sampler over random logits, by kind of request."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "random": {},
        "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    }
    for rows in (1, 37, 256):
        logits = [_randn(rows, VOCAB) * 3 for _ in range(3)]
        for kind, changes in kinds.items():
            plain: dict[str, Any] = {
                "temperature": 0.6,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                **changes,
            }
            made = [
                RowSampling(**plain, seed=row, sample_index=0, position=row) for row in range(rows)
            ]
            batch = SamplingBatch.from_rows(made, "cuda")
            us = replay([partial(sampling.sample, x, batch) for x in logits])
            yield Timing(f"sample {kind}", f"{rows} rows", us, rows * VOCAB * 2)


def time_prefill() -> Iterator[Timing]:
    """Prefill attention over whole prompts, beside torch's own attention on dense tensors."""
    k, v = _randn(600, BLOCK, KV_HEADS, DIM), _randn(600, BLOCK, KV_HEADS, DIM)
    for count, length in ((16, 512), (8, 1024), (1, 8192)):
        table = torch.randperm(count * length // BLOCK).view(count, -1).int().cuda()
        lens = torch.full((count,), length, dtype=torch.int32, device="cuda")
        bounds = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
        q = _randn(count * length, HEADS, DIM)
        flops = 2 * count * length * (length + 1) * HEADS * DIM
        heads = [q.view(count, length, HEADS, DIM).transpose(1, 2)]
        heads += [_randn(count, KV_HEADS, length, DIM) for _ in range(2)]
        ours = partial(prefill.prefill_attention, q, k, v, table, lens, bounds, length, DIM**-0.5)
        dense = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        torchs = partial(dense, *heads)
        for name, call in (("prefill_attention", ours), ("torch sdpa, dense", torchs)):
            yield Timing(name, f"{count} x {length}", replay([call], 4), flops=flops)


def run() -> dict[str, object]:
    """Measure everything, print as it comes, and return the record for a JSON file."""
    read, rate = bandwidth(), matrix_rate()
    print(f"read bandwidth {read / 1e12:.2f} TB/s, bf16 matrix rate {rate / 1e12:.0f} TFLOP/s")
    timings = []
    for part in (time_decode, time_products, time_small, time_sampling, time_prefill):
        for timing in part():
            limit = max(timing.bytes / read, timing.flops / rate) * 1e6
            timings.append(replace(timing, share=limit / timing.us))
            print(timings[-1].line(), flush=True)
    record = {"environment": stamp(torch.device("cuda")), "read_bytes_per_s": read}
    return {**record, "flops_per_s": rate, "timings": [asdict(timing) for timing in timings]}


if __name__ == "__main__":
    with torch.inference_mode():
        record = run()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")
