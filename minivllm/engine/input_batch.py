"""From a step plan to the tensors of one launch.

Owns the arithmetic of positions, slots and row bounds, in NumPy, one transfer a field. Never reads
a sequence: the plan is all it needs. Lessons 07, 08 and 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minivllm.engine.step_plan import StepPlan
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.kv import slot_mapping


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Inputs of one launch."""

    ids: torch.Tensor  # [T] int64; 0 where the token is still on the device
    unread: list[int]  # indices into T of those tokens
    unread_rows: list[int]  # their rows in the plan
    batch: AttentionBatch
    last_rows: list[int]  # index into T of each row's last token


def build_inputs(plan: StepPlan, block_size: int, device: torch.device) -> InputBatch:
    """Pack the plan's rows, in its order, without padding between them."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    unread: list[int] = []
    unread_rows: list[int] = []
    last_rows: list[int] = []
    for index, row in enumerate(plan.rows):
        ids.extend(row.token_ids)
        if len(row.token_ids) < row.num_tokens:
            unread.append(len(ids))
            unread_rows.append(index)
            ids.append(0)
        positions.extend(range(row.start, row.end))
        slots.extend(slot_mapping(row.block_table, row.start, row.end, block_size))
        last_rows.append(len(ids) - 1)
    width = max(len(row.block_table) for row in plan.rows)
    tables = np.full((len(plan.rows), width), -1, dtype=np.int32)
    for index, row in enumerate(plan.rows):
        tables[index, : len(row.block_table)] = row.block_table
    lengths = [row.num_tokens for row in plan.rows[plan.num_decode :]]
    bounds = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
    batch = AttentionBatch(
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_tables=torch.from_numpy(tables).to(device),
        context_lens=torch.tensor([row.end for row in plan.rows], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.from_numpy(bounds).to(device),
        max_seqlen_q=max(lengths, default=0),
        num_decode=plan.num_decode,
    )
    return InputBatch(
        ids=torch.tensor(ids, dtype=torch.int64, device=device),
        unread=unread,
        unread_rows=unread_rows,
        batch=batch,
        last_rows=last_rows,
    )
