"""Decode steps as CUDA graphs, from slot numbers to sampled tokens.

Owns the buckets of batch sizes, the graphs and the tensors they were captured on. Never decides
what runs: it replays what `decode_step` did when it was captured, on other slot numbers. Pads are
rows of the pad slot: they store nothing, read nothing and stay where they are. Lesson 15.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from minivllm.engine.graphs import GraphPool, pick_bucket
from minivllm.ops.pinned import PinnedRing

# (slots [B], blocks [B], logits out [B, V]) -> sampled ids [B]
Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, ascending; the last is `max_num_seqs`, so every size has one.

    Powers of two, then steps of 8 to 64, of 16 to 256 and of 32 beyond: padding costs the attention
    of no row at all (pads have no context) and a few percent of the matrix products, a graph 60 ms
    of every start.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Decode at all batch sizes."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        dtype: torch.dtype,
        pad_slot: int,
        device: torch.device,
    ) -> None:
        self.buckets = decode_buckets(max_num_seqs)
        self._pad = (pad_slot, 0)
        # Slot and block side by side: one copy a step brings both.
        self._inputs = torch.zeros(max_num_seqs, 2, dtype=torch.int64, device=device)
        self._inputs[:, 0] = pad_slot
        self._host = PinnedRing((max_num_seqs, 2), torch.int64)
        # One buffer for all: an output of each graph's own would keep V x sum of buckets alive.
        self.logits = torch.empty(max_num_seqs, vocab_size, dtype=dtype, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self, decode: Decode, pool: GraphPool) -> None:
        """Record every bucket. All rows are pads: nothing is stored, no sequence is touched.

        decode is not kept: it holds the runner, and a runner in a ring of references would keep its
        KV pool until the next search for garbage.
        """
        for bucket in reversed(self.buckets):
            slots, blocks = self._inputs[:bucket].unbind(1)
            step = partial(decode, slots, blocks, self.logits[:bucket])
            self._graphs[bucket] = pool.capture(step)

    def replay(self, slots: list[int], blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch -> sampled ids [B], logits [B, V]; the next replay overwrites both."""
        rows = len(slots)
        bucket = pick_bucket(self.buckets, rows)
        with self._host.next() as host:
            array = host.numpy()
            array[:rows, 0] = slots
            array[:rows, 1] = blocks
            array[rows:bucket] = self._pad
            self._inputs[:bucket].copy_(host[:bucket], non_blocking=True)
        graph, sampled = self._graphs[bucket]
        graph.replay()
        return sampled[:rows], self.logits[:rows]
