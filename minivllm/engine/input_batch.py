"""From the prefill rows of a step plan to the tensors of one launch.

Owns the arithmetic of positions, slots and row bounds. Never reads a sequence: the rows are all it
needs. Decode rows need none of this, their numbers live in `DeviceState`. Lessons 07, 08 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minivllm.engine.step_plan import ScheduledRow
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.kv import slots_of


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Inputs of one prefill launch."""

    ids: torch.Tensor  # [T] int64
    batch: AttentionBatch
    last_rows: list[int]  # index into T of each row's last token


def build_inputs(rows: Sequence[ScheduledRow], block_size: int, device: torch.device) -> InputBatch:
    """Pack the rows, in their order, without padding between them."""
    ids: list[int] = []
    for row in rows:
        assert len(row.token_ids) == row.num_tokens, "a prompt's tokens are all known"
        ids.extend(row.token_ids)
    positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
    slots = np.concatenate(
        [slots_of(row.block_table, row.start, row.end, block_size) for row in rows]
    )
    width = max(len(row.block_table) for row in rows)
    tables: npt.NDArray[np.int32] = np.full((len(rows), width), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.block_table)] = row.block_table
    lengths = [row.num_tokens for row in rows]
    bounds = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)

    def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = AttentionBatch(
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        context_lens=tensor([row.end for row in rows], torch.int32),
        cu_seqlens_q=torch.from_numpy(bounds).to(device),
        max_seqlen_q=max(lengths),
        num_decode=0,
    )
    return InputBatch(tensor(ids, torch.int64), batch, [int(end) - 1 for end in bounds[1:]])
