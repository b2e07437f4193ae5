"""Two questions of one request: how long for a token, and how fast is a prompt read.

Owns the sweeps over batch sizes and prompt lengths. Never loads a model. Lessons 12, 13 and 15.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.bench import limit, measure, step_time
from minivllm.bench.workload import Workload

if TYPE_CHECKING:
    from minivllm.llm import LLM


def fitting(llm: LLM, batches: Sequence[int], context: int, tokens: int) -> list[int]:
    """Those sizes for which the engine has seats and KV blocks."""
    return [batch for batch in batches if step_time.fits(llm, [context + tokens] * batch)]


def sweep_batches(
    llm: LLM,
    machine: limit.Machine,
    batches: Sequence[int],
    context: int,
    tokens: int,
) -> list[dict[str, float]]:
    """Milliseconds a token of `batch` equal requests of `context` prompt tokens, for each size.

    ms_per_token is what a client sees, device_ms the device's part of such a step, limit_ms the
    roofline's. Raises ValueError where a size does not fit the engine.
    """
    for batch in batches:  # before minutes of measuring the others
        step_time.check_fits(llm, [context + tokens] * batch)
    rows = []
    for batch in batches:
        contexts = [context + tokens // 2] * batch
        workload = _equal(llm, batch, context, tokens + 1)
        # Twice: the first has whatever is done once for a new size in it.
        best = min(
            measure.measure_repeats(llm, workload, 2), key=lambda result: result.inter_token.p50
        )
        device = step_time.decode_seconds(llm, contexts)
        rows.append(
            {
                "batch": batch,
                "ms_per_token": 1e3 * best.inter_token.p50,
                "device_ms": 1e3 * device,
                "limit_ms": 1e3 * limit.decode_limit(llm.model_config, contexts, machine),
                "ttft_ms": 1e3 * best.ttft.p50,
                "tokens_per_s": batch / best.inter_token.p50,
            }
        )
    return rows


def sweep_prompts(
    llm: LLM, machine: limit.Machine, lengths: Sequence[int]
) -> list[dict[str, float]]:
    """Prompt tokens a second for each length: one prompt alone, and as many as fill one step."""
    budget = llm.config.max_num_batched_tokens
    assert budget is not None
    for length in lengths:  # the token that comes with the prompt is not stored
        step_time.check_fits(llm, [length])
    rows = []
    for length in lengths:
        for count in sorted({1, max(1, min(budget // length, llm.config.max_num_seqs))}):
            workload = _equal(llm, count, length, 1)
            seconds = min(result.seconds for result in measure.measure_repeats(llm, workload, 3))
            least = limit.prefill_limit(llm.model_config, [length] * count, machine)
            rows.append(
                {
                    "prompts": count,
                    "length": length,
                    "ms": 1e3 * seconds,
                    "tokens_per_s": count * length / seconds,
                    "tflop_per_s": least * machine.ceilings.flops_per_s / seconds / 1e12,
                    "share": least / seconds,
                }
            )
    return rows


def _equal(llm: LLM, count: int, length: int, tokens: int) -> Workload:
    """`count` requests of one size, all different: nothing is found in the prefix cache."""
    rng = random.Random(length)
    top = min(10_000, llm.model_config.vocab_size - 1)
    prompts: list[Any] = [[rng.randint(0, top) for _ in range(length)] for _ in range(count)]
    return Workload(f"{count} x {length}", prompts, [tokens] * count)
