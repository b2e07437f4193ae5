"""The captured graphs of an engine, decode and prefill, in one memory pool.

Owns both sets and what capturing them cost. Never launches anything of its own. Lesson 15.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from minivllm.engine.decode_graphs import Decode, DecodeGraphs
from minivllm.engine.graphs import GraphPool
from minivllm.engine.prefill_graphs import Prefill, PrefillGraphs


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """What `ModelRunner.launch` replays."""

    decode: DecodeGraphs
    prefill: PrefillGraphs | None  # None: the backend's prefill cannot be captured
    seconds: float
    num_bytes: int

    @property
    def count(self) -> int:
        """Graphs captured."""
        return len(self.decode.buckets) + (len(self.prefill.buckets) if self.prefill else 0)


def capture_all(
    decode_graphs: DecodeGraphs,
    decode: Decode,
    prefill_graphs: PrefillGraphs | None,
    prefill: Prefill,
) -> StepGraphs:
    """Record every bucket of both, the larger ones first."""
    started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    pool = GraphPool()
    if prefill_graphs is not None:
        prefill_graphs.capture(prefill, pool)
    decode_graphs.capture(decode, pool)
    torch.cuda.synchronize()
    taken = max(free - torch.cuda.mem_get_info()[0], 0)
    return StepGraphs(decode_graphs, prefill_graphs, time.perf_counter() - started, taken)
