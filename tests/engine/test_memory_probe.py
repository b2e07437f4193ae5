"""The step whose memory is measured: as large as the scheduler may plan, over a small pool."""

from __future__ import annotations

import pytest

from minivllm.engine.memory_probe import most_tokens, step_of
from minivllm.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("seats", "length", "budget", "tokens"),
    [(256, 4096, 8192, 8192), (1, 512, 8192, 512), (5000, 64, 8192, 8192), (3, 50, 100, 100)]
    + [(7, 1, 8192, 7), (1, 1, 1, 1)],
)
def test_the_largest_step(seats: int, length: int, budget: int, tokens: int) -> None:
    config = EngineConfig(max_num_seqs=seats, max_model_len=length, max_num_batched_tokens=budget)
    assert most_tokens(config) == tokens
    plan = step_of(config, tokens)
    assert plan.num_tokens == tokens and len(plan.rows) == min(seats, tokens)
    assert max(row.end for row in plan.rows) <= length
    blocks = {block for row in plan.rows for block in row.block_table}
    for row in plan.rows:
        assert len(row.block_table) * config.kvcache_block_size >= row.end
        assert row.sampling is not None
    # All rows share their blocks: the probe's pool is no larger than one sequence.
    assert len(blocks) * config.kvcache_block_size <= plan.rows[0].end + 15
