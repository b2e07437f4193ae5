"""Captures a function as a CUDA graph: one launch instead of some three hundred.

Owns the rule of capturing and the choice of a bucket, for decode and for prefill. Never knows what
it captures. Lesson 15.

| rule | because |
|---|---|
| inputs are written into the captured tensors, never rebound | a graph replays addresses |
| a batch is padded up to its bucket | a graph has one shape |
| largest bucket first, all in one memory pool | the small ones fit into its freed space |
| what a replay leaves is read before the next one, on the same stream | they share that space |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

import torch

Output = TypeVar("Output")
Pool = tuple[int, int]


def pick_bucket(buckets: list[int], size: int) -> int:
    """The smallest bucket that holds `size` rows or tokens."""
    return buckets[bisect_left(buckets, size)]


def capture(
    function: Callable[[], Output], pool: Pool | None
) -> tuple[torch.cuda.CUDAGraph, Output, Pool]:
    """Record `function`: its graph, its outputs' tensors, and the pool for the next capture."""
    # Outside the graph first: kernels are compiled and libraries set up by a first call.
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = function()
    return graph, output, pool or graph.pool()
