"""The 8-bit KV cache in the engine: opt-in, close to the exact one, the same however it is cut."""

from __future__ import annotations

import random

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.hub import resolve_model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, 2000) for _ in range(length)] for length in (3, 17, 40, 64, 90)]


def answers(prompts: list[list[int]], **options) -> tuple[LLM, list[list[int]]]:
    llm = LLM(str(resolve_model("tiny")), max_model_len=256, max_num_seqs=8, **options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return llm, [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def test_a_quarter_of_the_bytes_and_a_scale_a_head(prompts: list[list[int]]) -> None:
    exact, _ = answers(prompts, num_kvcache_blocks=100)
    small, _ = answers(prompts, num_kvcache_blocks=100, kv_cache_dtype="fp8")
    assert small.engine.runner.kv_cache.dtype == torch.float8_e4m3fn
    head_dim = exact.model_config.head_dim
    assert small.stats.kv_bytes / exact.stats.kv_bytes == (head_dim + 4) / (4 * head_dim)


def test_close_to_the_exact_cache_and_not_equal_to_it(prompts: list[list[int]]) -> None:
    """Log-probabilities of a given text move a little; greedy texts mostly stay."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for dtype in ("auto", "fp8"):
        llm, _ = answers(prompts, kv_cache_dtype=dtype)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rows = [o.prompt_logprobs[1:] for o in outputs]
        found.append(torch.tensor([next(iter(e.values())).logprob for row in rows for e in row]))
    error = (found[0] - found[1]).abs()
    assert 0 < error.mean() < 0.1, error.mean()


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 16}, {"num_kvcache_blocks": 20}, {"attention_backend": "torch"}],
)
def test_tokens_do_not_depend_on_chunks_or_preemption(
    prompts: list[list[int]], options: dict
) -> None:
    """Prefill reads its own keys back in 8 bits too, so a chunk border changes nothing."""
    _, whole = answers(prompts, kv_cache_dtype="fp8")
    _, cut = answers(prompts, kv_cache_dtype="fp8", **options)
    assert cut == whole
