"""What limits a step: the machine's two ceilings, and the work of a decoder against them.

Owns the counting of parameters, operations and bytes from a config, and the measuring of the
ceilings. The counts are the model's necessary work, not what a program happens to do. Lesson 05.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minivllm.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best this machine did: bytes read and operations (multiply, add) a second."""

    bytes_per_s: float
    flops_per_s: float
    device: str
    dtype: str

    @property
    def ridge(self) -> float:
        """Operations per byte at which the two ceilings meet: left of it memory is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """Operations a second that work of `intensity` operations per byte can reach at most."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def to_dict(self) -> dict[str, float | str]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)


def parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part of the model, all layers together; a tied head adds none."""
    c = config
    qkv_out = c.q_size + 2 * c.kv_size
    attention = qkv_out * c.hidden_size + c.hidden_size * c.q_size
    attention += qkv_out * c.qkv_bias + c.hidden_size * c.o_bias
    mlp = 3 * c.hidden_size * c.intermediate_size
    mlp += (2 * c.intermediate_size + c.hidden_size) * c.mlp_bias
    norms = 2 * c.hidden_size + 2 * c.head_dim * c.qk_norm
    table = c.vocab_size * c.hidden_size
    return {
        "embedding": table,
        "attention": c.num_layers * attention,
        "MLP": c.num_layers * mlp,
        "norms": c.num_layers * norms + c.hidden_size,
        "head": 0 if c.tie_word_embeddings else table,
    }


def step_work(
    config: ModelConfig, tokens: int, context: int, element_size: int, rows: int = 1
) -> tuple[int, int]:
    """(operations, bytes) that a step cannot do without.

    tokens: new ones of each of `rows` sequences; context: tokens before them, in the cache.
    Every weight is read once, however many tokens use it; keys and values once a row; logits are
    computed for one token a row.
    """
    c, parts = config, parameters(config)
    table = c.vocab_size * c.hidden_size
    products = parts["attention"] + parts["MLP"]
    # Two operations, multiply and add, for each weight and token; scores and their use for each
    # pair of a new token and a token at or before it.
    pairs = tokens * context + tokens * (tokens + 1) // 2
    flops = 2 * rows * (tokens * products + table)
    flops += 2 * 2 * rows * c.num_layers * c.q_size * pairs
    weights = (products + parts["norms"] + table) * element_size
    kv = rows * (context + tokens) * config.kv_bytes_per_token(element_size)
    return flops, weights + kv


def ceilings(
    device: torch.device,
    dtype: torch.dtype | None = None,
    read_bytes: int | None = None,
    side: int | None = None,
    seconds: float = 0.3,
) -> Ceilings:
    """Measure both: reading a tensor, and a square matrix product. Takes 2 * `seconds`.

    read_bytes: size of that tensor. Memory has levels: what fits in a cache is read faster, so a
    fair roof for a small model is measured with a tensor as large as its weights.
    """
    cuda = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if cuda else torch.float32)
    # Far more than any cache holds, and what a small card can spare.
    most = min(1 << 33, torch.cuda.mem_get_info(device)[0] // 4) if cuda else 1 << 26
    size = read_bytes or most
    side = side or (8192 if cuda else 768)
    # float32 whatever the product's type: a sum of 16-bit numbers is held up by converting them.
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    a = torch.randn(side, side, dtype=dtype, device=device)
    reading = best_time(lambda: data.sum(), device, seconds)
    product = best_time(lambda: a @ a, device, seconds)
    name = str(dtype).removeprefix("torch.")
    return Ceilings(size / reading, 2 * side**3 / product, str(device), name)


def best_time(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest call within about `seconds`; a CUDA device is waited for."""

    def once() -> float:
        if device.type == "cuda":  # between events, so that the launch itself is not counted
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            work()
            marks[1].record()
            marks[1].synchronize()
            return marks[0].elapsed_time(marks[1]) / 1e3
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    once()
    best, ends = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        best = min(best, once())
    return best
