"""How much GPU memory a step needs besides weights and KV cache, found by running one.

Owns the largest step that the scheduler may plan, as a plan of pad-like rows. Never guesses: what a
formula leaves out (workspaces, the sampler's float32 logits) shows up as an out-of-memory error in
the middle of a run. Lesson 08.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minivllm.engine.model_runner import ModelRunner
from minivllm.engine.step_plan import RowSampling, ScheduledRow, StepPlan
from minivllm.engine_config import EngineConfig


def largest_step(config: EngineConfig) -> StepPlan:
    """A plan that fills the token budget, with as many sequences as may run."""
    assert config.max_num_batched_tokens is not None and config.max_model_len is not None
    count = config.max_num_seqs
    length = max(1, min(config.max_num_batched_tokens // count, config.max_model_len))
    blocks = -(-length // config.kvcache_block_size)
    rows = [
        ScheduledRow(
            seq_id=index,
            epoch=0,
            start=0,
            end=length,
            token_ids=[0] * length,
            block_table=list(range(index * blocks, (index + 1) * blocks)),
            sampling=RowSampling(1.0, 0, 0.9, 0.0, 0, 0, length),
        )
        for index in range(count)
    ]
    return StepPlan(rows, num_decode=0)


def activation_bytes(make_runner: Callable[[int], ModelRunner], config: EngineConfig) -> int:
    """Peak of the largest step beyond what was allocated before it.

    make_runner: number of KV blocks -> a runner; the one made here is gone when this returns.
    """
    plan = largest_step(config)
    runner = make_runner(sum(len(row.block_table) for row in plan.rows))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.collect(runner.launch(plan))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()  # what the probe took goes back to the card, for the pool
    return peak
