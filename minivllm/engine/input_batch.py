"""From the rows of a step plan to the numbers of one launch.

Owns the arithmetic of positions, slots and row bounds. Never reads a sequence: the rows are all it
needs. A decode row's token and its older blocks are on the device already, see `DeviceState`.
Lessons 07, 08 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from minivllm.engine.step_plan import ScheduledRow
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.kv import slots_of
from minivllm.ops.pinned import to_device

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Inputs of one prefill launch."""

    ids: torch.Tensor  # [T] int64
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The same on the host: rows in their order, without padding between them."""

    ids: Numbers  # [T]
    positions: Numbers  # [T]
    slots: Numbers  # [T]
    ends: Numbers  # [B]
    bounds: Numbers  # [B + 1]
    tables: npt.NDArray[np.int32]  # [B, M], -1 pads

    @property
    def last_rows(self) -> list[int]:
        """Index into T of each row's last token."""
        last: list[int] = (self.bounds[1:] - 1).tolist()
        return last

    def to(self, device: torch.device) -> InputBatch:
        """Copied to the device, tensor by tensor."""

        def copied(values: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(torch.from_numpy(values), device)

        batch = AttentionBatch(
            positions=copied(self.positions),
            slot_mapping=copied(self.slots),
            block_tables=copied(self.tables),
            context_lens=copied(self.ends.astype(np.int32)),
            cu_seqlens_q=copied(self.bounds.astype(np.int32)),
            max_seqlen_q=int(np.diff(self.bounds).max()),
            num_decode=0,
        )
        return InputBatch(copied(self.ids), batch)


def pack_rows(rows: Sequence[ScheduledRow], block_size: int) -> PackedRows:
    """The numbers of prefill rows, one after the other."""
    for row in rows:
        assert len(row.token_ids) == row.num_tokens, "a prompt's tokens are all known"
    width = max(len(row.block_table) for row in rows)
    tables: npt.NDArray[np.int32] = np.full((len(rows), width), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.block_table)] = row.block_table
    return PackedRows(
        ids=np.concatenate([np.array(row.token_ids, dtype=np.int64) for row in rows]),
        positions=np.concatenate([np.arange(row.start, row.end) for row in rows]),
        slots=np.concatenate(
            [slots_of(row.block_table, row.start, row.end, block_size) for row in rows]
        ),
        ends=np.array([row.end for row in rows], dtype=np.int64),
        bounds=np.concatenate(([0], np.cumsum([row.num_tokens for row in rows]))),
        tables=tables,
    )


DECODE_PAD = (0, 0, 0, -1, 0)  # see pack_decode; before them the pad slot


def pack_decode(rows: Sequence[ScheduledRow], slots: Sequence[int], block_size: int) -> Numbers:
    """All that a decode launch is told of its rows: [6, B].

    | number | of a row | of a pad |
    |---|---|---|
    | slot | its row of the device state | the pad slot |
    | column | where in its block table its newest block stands | 0 |
    | position | of its newest token | 0 |
    | block | the newest block | 0 |
    | cache slot | where K and V of that token are stored | -1: nowhere |
    | context | tokens it attends to, that one included | 0: none |

    What kernels read as it stands is in an even row: of an odd B the others are not aligned to 16
    bytes, and Triton compiles another form for those.
    """
    position = np.array([row.start for row in rows], dtype=np.int64)
    column, offset = np.divmod(position, block_size)
    block = np.array([row.block_table[i] for row, i in zip(rows, column)], dtype=np.int64)
    cache_slot = block * block_size + offset
    return np.stack([np.array(slots), column, position, block, cache_slot, position + 1])
