"""How much GPU memory a step needs besides weights and KV cache, found by running one.

Owns the largest step that the scheduler may plan. Never guesses: what a formula leaves out
(workspaces, the sampler's float32 logits) shows up as an out-of-memory error in the middle of a
run. Lesson 08.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minivllm.engine.model_runner import ModelRunner
from minivllm.engine.step_plan import RowSampling, ScheduledRow, StepPlan
from minivllm.engine_config import EngineConfig


def most_tokens(config: EngineConfig) -> int:
    """Tokens of the largest step: the budget, or what all sequences hold where that is less."""
    assert config.max_num_batched_tokens is not None and config.max_model_len is not None
    return min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)


def step_of(config: EngineConfig, tokens: int) -> StepPlan:
    """A plan of so many tokens, in as many sequences as may run."""
    count = min(config.max_num_seqs, tokens)
    lengths = [tokens // count + (index < tokens % count) for index in range(count)]
    # The same blocks for all: what is stored does not matter, and a pool of its own size might
    # not fit where the engine does.
    blocks = list(range(-(-lengths[0] // config.kvcache_block_size)))
    rows = [
        ScheduledRow(
            seq_id=index,
            epoch=0,
            start=0,
            end=length,
            token_ids=[0] * length,
            block_table=blocks,
            sampling=RowSampling(1.0, 0, 0.9, 0.0, 0, 0, length),
        )
        for index, length in enumerate(lengths)
    ]
    return StepPlan(rows, num_decode=0)


def activation_bytes(
    make_runner: Callable[[int], ModelRunner], config: EngineConfig, tokens: int
) -> int:
    """Peak of a step of so many tokens beyond what was allocated before it.

    make_runner: number of KV blocks -> a runner; the one made here is gone when this returns.
    """
    plan = step_of(config, tokens)
    runner = make_runner(len(plan.rows[0].block_table))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    runner.collect(runner.launch(plan))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()  # what the probe took goes back to the card, for the pool
    return peak
