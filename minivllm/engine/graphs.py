"""Captures a function as a CUDA graph: one launch instead of some three hundred.

Owns the rules of capturing, for decode and for prefill. Never knows what it captures. Lesson 15.

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


def pick_bucket(buckets: list[int], size: int) -> int:
    """The smallest bucket that holds `size` rows or tokens."""
    return buckets[bisect_left(buckets, size)]


class GraphPool:
    """The memory that the graphs of one engine share, and the stream on which all are recorded.

    Both belong to the GPU that is current when this is made; torch's own capture stream stays with
    the first GPU that ever captured.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._memory: tuple[int, int] | None = None  # torch's handle, once there is a graph

    def capture(self, function: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Record `function`: its graph and the tensors that a replay leaves its results in."""
        # Outside the graph first: kernels are compiled and libraries set up by a first call.
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._memory,
            stream=self._stream,
            # By default a capture fails when another thread allocates: one that generates, say.
            capture_error_mode="thread_local",
        ):
            output = function()
        if self._memory is None:
            self._memory = graph.pool()
        return graph, output
