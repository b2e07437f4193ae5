"""Padding of captured launches, the GPU played by the CPU (replays are tested in tests/gpu)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from played_gpu import Pool, Ring

from minivllm.engine import prefill_graphs
from minivllm.engine.input_batch import pack_rows
from minivllm.engine.prefill_graphs import MOST_TOKENS, PrefillGraphs, prefill_buckets
from minivllm.engine.step_plan import ScheduledRow
from minivllm.ops.attention_batch import AttentionBatch

CPU = torch.device("cpu")


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(prefill_graphs, "PinnedRing", Ring)
    seen = []

    def prefill(ids, batch, out):
        tensors = {
            name: value.clone()
            for name in AttentionBatch.__slots__
            if isinstance(value := getattr(batch, name), torch.Tensor)
        }
        seen.append((ids.clone(), replace(batch, **tensors)))
        out.copy_(ids[:, None].expand(-1, 4))

    made = PrefillGraphs(
        max_tokens=100, max_rows=5, table_width=7, hidden_size=4,
        dtype=torch.float32, device=CPU,
    )  # fmt: skip
    made.capture(prefill, Pool())
    return made, seen, prefill


def rows_of(*spans):
    rows, block = [], 0
    for index, (start, end) in enumerate(spans):
        table = list(range(block, block + -(-end // 16)))
        block += len(table)
        ids = [100 * index + 1 + i for i in range(start, end)]
        rows.append(ScheduledRow(index, 0, start, end, ids, table, None))
    return rows


def test_capturing_stores_nothing(graphs):
    _, seen, _ = graphs
    assert [len(ids) for ids, _ in seen] == [100, 64]
    for ids, batch in seen:
        assert not ids.any() and (batch.slot_mapping == -1).all()
        assert not batch.context_lens.any() and not batch.cu_seqlens_q.any()


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, 64)],
        [(0, 65)],
        [(0, 100)],
        [(3, 20), (0, 40), (16, 17)],
        [(i, i + 1) for i in range(5)],
    ],
)
def test_a_launch_sees_its_rows_and_pads_behind_them(graphs, spans):
    made, seen, prefill = graphs
    for lead in ([(0, 90)], [(0, 60)]):  # what an earlier launch left must not show
        made.replay(pack_rows(rows_of(*lead), 16))
    rows = rows_of(*spans)
    packed = pack_rows(rows, 16)
    hidden = made.replay(packed)
    ids, batch = seen[-1]
    plain = packed.to(CPU)
    tokens, count = len(plain.ids), len(rows)
    assert len(ids) == (64 if tokens <= 64 else 100)
    assert torch.equal(ids[:tokens], plain.ids) and not ids[tokens:].any()
    assert torch.equal(hidden[:, 0], plain.ids.float())
    assert torch.equal(batch.positions[:tokens], plain.batch.positions)
    assert torch.equal(batch.slot_mapping[:tokens], plain.batch.slot_mapping)
    assert (batch.slot_mapping[tokens:] == -1).all()
    assert torch.equal(batch.context_lens[:count], plain.batch.context_lens)
    assert not batch.context_lens[count:].any()
    assert torch.equal(batch.cu_seqlens_q[: count + 1], plain.batch.cu_seqlens_q)
    assert (batch.cu_seqlens_q[count:] == tokens).all()
    width = plain.batch.block_tables.shape[1]
    assert torch.equal(batch.block_tables[:count, :width], plain.batch.block_tables)
    assert len(batch.context_lens) == len(batch.block_tables) == min(5, len(ids) // 8)


def test_many_short_rows_take_a_larger_bucket(graphs):
    made, seen, prefill = graphs
    made.buckets = [16, 100]
    made.capture(prefill, Pool())
    made.replay(pack_rows(rows_of((0, 3), (0, 3)), 16))
    assert len(seen[-1][0]) == 16
    made.replay(pack_rows(rows_of((0, 3), (0, 3), (0, 3)), 16))
    assert len(seen[-1][0]) == 100


def test_more_tokens_than_the_largest_bucket_do_not_fit(graphs):
    made, *_ = graphs
    assert made.fits(pack_rows(rows_of((0, 100)), 16))
    assert not made.fits(pack_rows(rows_of((0, 96), (0, 5)), 16))


@pytest.mark.parametrize("limit", [1, 40, 64, 100, 512, 1000, 1024, 2048, 5000, 8192, 20000])
def test_every_launch_up_to_the_limit_has_a_bucket(limit):
    buckets = prefill_buckets(limit)
    assert buckets == sorted(set(buckets)) and buckets[-1] == min(limit, MOST_TOKENS)
    for smaller, larger in pairwise(buckets):
        assert larger <= max(2 * smaller, 64)  # no launch is padded to more than twice its size
