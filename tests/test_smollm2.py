"""The real checkpoint, in one batch, against transformers: marker slow, needs SmolLM2 in the cache.

One forward of transformers over prompt and answer proves the whole answer: if each token is the
best one after those before it, the text is the greedy text. An answer may part from it only by the
excuse rule of `tiny_models`.
"""

from __future__ import annotations

import os

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.hub import cache_dir
from tiny_models import MARGIN, Reference

QUESTIONS = [
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Explain what a cache is to a child.",
    "Name three uses of a paper clip.",
    "What is 7 times 8? Think step by step.",
    "Translate 'good morning' into Spanish.",
    "Hi",
    "Give me a recipe for pancakes, with the quantities of flour, milk and eggs in a list.",
]
COUNT = 48


@pytest.mark.slow
def test_smollm2_greedy_tokens_of_a_batch_equal_transformers() -> None:
    path = cache_dir() / "smollm2"
    if not (path / "config.json").exists():
        if os.environ.get("MINIVLLM_REQUIRE_SMOLLM2"):
            pytest.fail(f"{path} is missing, and this run requires SmolLM2")
        pytest.skip("SmolLM2 is not in the cache: minivllm fetch smollm2")
    llm = LLM(str(path), max_model_len=512, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, params, use_tqdm=False)
    assert max(step.num_decode for step in llm.stats.steps) == len(QUESTIONS)
    reference = Reference(path)
    excused = 0
    for output in outputs:
        answer = output.outputs[0].token_ids
        assert len(answer) == COUNT
        ids = [*output.prompt_token_ids, *answer]
        best = reference.logits(ids)[len(output.prompt_token_ids) - 1 : -1].topk(2)
        wrong = (best.indices[:, 0] != torch.tensor(answer)).nonzero().flatten().tolist()
        if wrong:
            margin = float(best.values[wrong[0], 0] - best.values[wrong[0], 1])
            print(f"excused at token {wrong[0]}: margin {margin:.2e}")
            assert margin < MARGIN
            excused += 1
    assert excused == 0, f"{excused} of {len(QUESTIONS)} answers part from transformers'"
    assert "Paris" in outputs[0].outputs[0].text
