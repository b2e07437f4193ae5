"""The numbers of a launch against the plain arithmetic of one token at a time."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from minivllm.engine.decode_step import decode_step
from minivllm.engine.device_state import DeviceState
from minivllm.engine.input_batch import DECODE_PAD, pack_decode, pack_rows
from minivllm.engine.step_plan import ScheduledRow
from minivllm.ops.kv import slot_mapping


def rows_of(rng: random.Random, block_size: int, count: int, most: int) -> list[ScheduledRow]:
    """Rows of 1 to `most` tokens behind a context of any length, over blocks in any order."""
    rows = []
    for seq_id in range(count):
        start = rng.randrange(5 * block_size)
        end = start + rng.randint(1, most)
        blocks = rng.sample(range(1000), -(-end // block_size) + rng.randrange(2))
        rows.append(ScheduledRow(seq_id, 0, start, end, list(range(end - start)), blocks, None))
    return rows


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_decode_rows(block_size: int) -> None:
    rng = random.Random(block_size)
    rows = rows_of(rng, block_size, 40, 1)
    slots = rng.sample(range(99), 40)
    numbers = pack_decode(rows, slots, block_size)
    assert numbers.shape == (1 + len(DECODE_PAD), 40) and numbers.dtype == "int64"
    for row, slot, told in zip(rows, slots, numbers.T.tolist(), strict=True):
        (cache_slot,) = slot_mapping(row.block_table, row.start, row.end, block_size)
        column = row.start // block_size
        assert told == [slot, column, row.start, row.block_table[column], cache_slot, row.end]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_prefill_rows(block_size: int) -> None:
    rows = rows_of(random.Random(block_size), block_size, 20, 40)
    packed = pack_rows(rows, block_size)
    for index, row in enumerate(rows):
        first, last = packed.bounds[index : index + 2]
        assert packed.ids[first:last].tolist() == row.token_ids
        assert packed.positions[first:last].tolist() == list(range(row.start, row.end))
        expected = slot_mapping(row.block_table, row.start, row.end, block_size)
        assert packed.slots[first:last].tolist() == expected
        assert packed.last_rows[index] == last - 1 and packed.ends[index] == row.end
        table = packed.tables[index].tolist()
        blocks = len(row.block_table)
        assert table[:blocks] == row.block_table and set(table[blocks:]) <= {-1}


def test_what_kernels_read_of_decode_rows_is_aligned() -> None:
    """Triton compiles another form of a kernel for a tensor that does not begin at 16 bytes."""
    numbers = torch.from_numpy(pack_decode(rows_of(random.Random(1), 4, 3, 1), [2, 0, 1], 4))
    flat = torch.empty(2 * numbers.numel(), dtype=torch.int64)[: numbers.numel()]
    assert flat.data_ptr() % 16 == 0
    batches = []

    def model(ids, batch, *kv):
        batches.append(batch)
        return ids

    model.logits = lambda hidden, out: hidden
    ops = SimpleNamespace(sample=lambda logits, sampling: logits)
    state = DeviceState(3, 9, torch.device("cpu"))
    placed = flat.view(numbers.shape).copy_(numbers)
    decode_step(model, ops, state, (), placed, table_width=9, flags=(True, False))
    (batch,) = batches
    read = (batch.positions, batch.slot_mapping, batch.context_lens, batch.block_tables)
    assert [tensor.data_ptr() % 16 for tensor in read] == [0] * 4
