"""Helpers of tests/casebook: short names for parameters, a clean-pool check, scripted sampling.

Owns nothing of the engine: it drives it from outside, as a user of `LLM` or of the scheduler would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.device_state import DeviceState
from minivllm.engine.input_batch import pack_decode, pack_rows
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence as Seq
from minivllm.engine.step_plan import StepPlan


def G(count: int, **other: Any) -> SamplingParams:
    """Greedy, exactly `count` tokens."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **other)


def SP(**fields: Any) -> SamplingParams:
    """Twelve random tokens unless said otherwise."""
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **fields})


def make_llm(path: Path | str, *, depth: int = 0, **options: Any) -> LLM:
    """An engine with small blocks and a pool of known size.

    depth 1 launches a step before the one before it is read. The CPU runner computes at `launch`
    but keeps the sampled tokens on its side until `collect`, as a GPU does.
    """
    defaults: dict[str, Any] = {
        "device": "cpu",
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 64,
        "max_num_seqs": 16,
    }
    llm = LLM(str(path), **{**defaults, **options})
    llm.engine.depth = depth
    return llm


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    """`generate` without a progress bar; the pool must be clean afterwards."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_clean(llm)
    return outputs


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of each request's first sample."""
    return [output.outputs[0].token_ids for output in outputs]


def assert_clean(llm: LLM) -> None:
    """Nothing waiting, running or in flight, no block in use, every reference count 0."""
    scheduler = llm.engine.scheduler
    assert not llm.has_unfinished()
    assert not llm.engine.requests and not llm.engine.in_flight and not llm.engine._owner
    for queue in (scheduler.waiting, scheduler.running, scheduler.draining, scheduler.parked):
        assert not queue
    assert not scheduler.sequences
    scheduler.block_manager.check([])
    assert scheduler.block_manager.num_used == 0
    if isinstance(scheduler.block_manager, PrefixCache):
        assert not scheduler.block_manager.chains


def script(texts: dict[int, list[int]] | list[int], prompt_len: int) -> Callable[..., torch.Tensor]:
    """A `sample` part that returns given tokens: those of the row's sample index, by position."""

    def sample(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        rows = zip(batch.position.tolist(), batch.sample_index.tolist())
        return torch.tensor(
            [
                (texts[index] if isinstance(texts, dict) else texts)[position - prompt_len]
                for position, index in rows
            ]
        )

    return sample


def record_logits(llm: LLM) -> list[torch.Tensor]:
    """From now on, the logits [R, V] of every call of the head, in order."""
    model = llm.engine.runner.model  # type: ignore[attr-defined]
    seen: list[torch.Tensor] = []
    original = model.logits

    def logits(*args: Any) -> torch.Tensor:
        result: torch.Tensor = original(*args)
        seen.append(result.clone())
        return result

    model.logits = logits
    return seen


def prepared(plan: StepPlan, block_size: int) -> list[Any]:
    """All that a runner derives from a plan, as plain lists: prefill inputs and decode rows."""
    device = torch.device("cpu")
    split, found = plan.num_decode, []
    if plan.rows[split:]:
        packed = pack_rows(plan.rows[split:], block_size)
        inputs = packed.to(device)
        fields = dataclasses.asdict(inputs.batch)
        found = [inputs.ids.tolist(), packed.last_rows]
        found += [v.tolist() if isinstance(v, torch.Tensor) else v for v in fields.values()]
    state = DeviceState(len(plan.rows), 200, device)
    slots = state.assign(plan)
    state.prepare_decode(plan.rows[:split], slots[:split])
    decoding = slots[:split]
    if decoding:
        found += [pack_decode(plan.rows[:split], decoding, block_size).tolist()]
    sampling = state.sampling.select(torch.tensor(decoding, dtype=torch.int64))
    found += [sampling.reals.tolist(), sampling.integers.tolist()]
    return [*found, slots, *(t[decoding].tolist() for t in (state.last_token, state.block_table))]


# -- the scheduler half alone ---------------------------------------------------------------------


def make_scheduler(
    num_blocks: int, block_size: int = 4, caching: bool = True, **options: Any
) -> Scheduler:
    """A scheduler over a pool, without a model."""
    manager = (PrefixCache if caching else BlockManager)(num_blocks, block_size)
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    return Scheduler(manager, **{**defaults, **options})


def fake_token(seq_id: int, position: int) -> int:
    """What the fake sampler says: a function of sequence and position, so that replays agree."""
    return (seq_id * 7 + position * 3) % 11


def drive(
    scheduler: Scheduler,
    each_step: Callable[[StepPlan], None] | None = None,
    *,
    depth: int = 0,
    limit: int = 2000,
) -> int:
    """Run until nothing is left, with a fake sampler; returns the number of steps.

    After every step the block manager's invariants are checked against all live sequences.
    """
    in_flight: list[StepPlan] = []
    steps = 0
    while scheduler.has_unfinished or in_flight:
        plan = scheduler.schedule()
        assert plan is not None or in_flight, "work left, nothing planned, nothing to read"
        if plan is not None:
            assert 0 < plan.num_tokens <= scheduler.max_num_batched_tokens
            in_flight.append(plan)
            if each_step:
                each_step(plan)
        if plan is None or len(in_flight) > depth:
            oldest = in_flight.pop(0)
            tokens = [
                None if r.sampling is None else fake_token(r.seq_id, r.end) for r in oldest.rows
            ]
            scheduler.complete(oldest, tokens)
        scheduler.block_manager.check(list(scheduler.sequences.values()))
        steps += 1
        assert steps < limit, "no end in sight"
    return steps


def make_seq(seq_id: int, prompt: list[int], params: SamplingParams) -> Seq:
    """A sequence as the engine would make it."""
    return Seq(seq_id, prompt, params)
