"""Prefill launches as CUDA graphs, from token ids to hidden states.

Owns the buckets of token counts, the graphs and the tensors they were captured on. Never samples:
which rows are scored differs from step to step, so that part stays outside. Without graphs a prompt
of 128 tokens takes the host 12 ms to launch and an H200 1.4 ms to compute. Lesson 15.

Pads are tokens that are stored nowhere and belong to no row, and rows of no tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from minivllm.engine.graphs import GraphPool
from minivllm.engine.input_batch import PackedRows
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.pinned import PinnedRing

# (ids [T], batch, hidden out [T, H]) -> None
Prefill = Callable[[torch.Tensor, AttentionBatch, torch.Tensor], None]
# Launches of more tokens keep the device busy for longer than the host takes to make them.
MOST_TOKENS = 8192
LEAST_TOKENS_A_ROW = 8  # on average; launches of shorter rows take a larger bucket
Flat = TypeVar("Flat")


def prefill_buckets(max_tokens: int) -> list[int]:
    """Token counts to capture, ascending: powers of two, then steps of 1024."""
    limit = min(max_tokens, MOST_TOKENS)
    sizes = [64, 128, 256, 512, *range(1024, limit + 1, 1024)]
    return [*(size for size in sizes if size < limit), limit]


class PrefillGraphs:
    """Prefill at all buckets of token counts."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        table_width: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.buckets = prefill_buckets(max_tokens)
        self._max_rows = max_rows
        most = self.buckets[-1]
        # All numbers of a launch side by side, see `_split`: one copy a step brings them.
        size = 3 * most + 2 * max_rows + 1
        self._numbers = torch.zeros(size, dtype=torch.int64, device=device)
        self._host = PinnedRing((size,), torch.int64)
        self._tables = torch.zeros(max_rows, table_width, dtype=torch.int32, device=device)
        self._host_tables = PinnedRing((max_rows * table_width,), torch.int32)
        # One buffer for all buckets, as for the logits of decode.
        self.hidden = torch.empty(most, hidden_size, dtype=dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def fits(self, packed: PackedRows) -> bool:
        """Whether a bucket holds these rows: the largest has room for any number of them."""
        return len(packed.ids) <= self.buckets[-1]

    def capture(self, prefill: Prefill, pool: GraphPool) -> None:
        """Record every bucket. All tokens are pads: nothing is stored. `prefill` is not kept."""
        for bucket in reversed(self.buckets):
            self._numbers.zero_()
            self._split(self._numbers, bucket)[2].fill_(-1)
            self._graphs[bucket], _ = pool.capture(partial(self._launch, prefill, bucket))

    def replay(self, packed: PackedRows) -> torch.Tensor:
        """Run a launch -> hidden states [T, H], overwritten by the next replay."""
        tokens, (rows, width) = len(packed.ids), packed.tables.shape
        bucket = next(size for size in self.buckets if tokens <= size and rows <= self._rows(size))
        with self._host.next() as host:
            numbers = host.numpy()[: 3 * bucket + 2 * self._rows(bucket) + 1]
            ids, positions, slots, ends, bounds = self._split(numbers, bucket)
            for target, values, pad in (
                (ids, packed.ids, 0),
                (positions, packed.positions, 0),
                (slots, packed.slots, -1),
                (ends, packed.ends, 0),
                (bounds, packed.bounds, tokens),  # pad rows begin and end behind the last token
            ):
                target[: len(values)] = values
                target[len(values) :] = pad
            self._numbers[: len(numbers)].copy_(host[: len(numbers)], non_blocking=True)
        with self._host_tables.next() as host:
            tables = host[: rows * width].view(rows, width)
            tables.numpy()[:] = packed.tables
            self._tables[:rows, :width].copy_(tables, non_blocking=True)
        self._graphs[bucket].replay()
        return self.hidden[:tokens]

    def _rows(self, bucket: int) -> int:
        """Rows of a bucket, pads included.

        Every row may have a broken tile, so attention's grid grows with them: 128 rows for 128
        tokens cost 7 us a layer for programs with nothing to do (H200).
        """
        if bucket == self.buckets[-1]:
            return min(self._max_rows, bucket)
        return min(self._max_rows, bucket // LEAST_TOKENS_A_ROW)

    def _split(self, flat: Flat, bucket: int) -> list[Flat]:
        """ids, positions, slots [bucket each], ends [rows], bounds [rows + 1]: views of `flat`."""
        rows, views, start = self._rows(bucket), [], 0
        for size in (bucket, bucket, bucket, rows, rows + 1):
            views.append(flat[start : start + size])  # type: ignore[index]
            start += size
        return views

    def _launch(self, prefill: Prefill, bucket: int) -> None:
        ids, positions, slots, ends, bounds = self._split(self._numbers, bucket)
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=slots,
            block_tables=self._tables[: self._rows(bucket)],
            context_lens=ends.int(),
            cu_seqlens_q=bounds.int(),
            max_seqlen_q=bucket,
            num_decode=0,
        )
        prefill(ids, batch, self.hidden[:bucket])
