"""Decode steps as CUDA graphs, from six numbers a row to sampled tokens.

Owns the buckets of batch sizes, the graphs and the tensors they were captured on. Never decides
what runs: it replays what `decode_step` did when it was captured, on other numbers. Pads are rows
of the pad slot, that store and read nothing. Lesson 15.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from minivllm.engine.graphs import GraphPool, pick_bucket
from minivllm.engine.input_batch import DECODE_PAD, Numbers
from minivllm.ops.pinned import PinnedRing

# (numbers [6, B], logits out [B, V]) -> sampled ids [B]
Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
        # A column [6, 1], to be written over as many rows as are missing.
        self._pad = np.array([pad_slot, *DECODE_PAD])[:, None]
        size = len(self._pad) * max_num_seqs
        self._numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._host = PinnedRing((size,), torch.int64)
        # One buffer for all: an output of each graph's own would keep V x sum of buckets alive.
        self.logits = torch.empty(max_num_seqs, vocab_size, dtype=dtype, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self, decode: Decode, pool: GraphPool) -> None:
        """Record every bucket. All rows are pads: nothing is stored, no sequence is touched.

        decode is not kept: it holds the runner, and a runner in a ring of references would keep its
        KV pool until the next search for garbage.
        """
        for bucket in reversed(self.buckets):
            numbers = self._split(self._numbers, bucket)
            numbers.copy_(torch.from_numpy(self._pad))
            step = partial(decode, numbers, self.logits[:bucket])
            self._graphs[bucket] = pool.capture(step)

    def replay(self, numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch of `pack_decode` -> sampled ids [B], logits [B, V].

        The next replay overwrites both.
        """
        rows = numbers.shape[1]
        bucket = pick_bucket(self.buckets, rows)
        with self._host.next() as host:
            padded = self._split(host, bucket)
            padded.numpy()[:, :rows] = numbers
            padded.numpy()[:, rows:] = self._pad
            self._split(self._numbers, bucket).copy_(padded, non_blocking=True)
        graph, sampled = self._graphs[bucket]
        graph.replay()
        return sampled[:rows], self.logits[:rows]

    def _split(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        """[6, bucket], the first part of `flat`: without gaps, so that one copy brings all."""
        return flat[: len(self._pad) * bucket].view(-1, bucket)
