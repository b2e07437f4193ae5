"""The compiled forms on a card: the same text as the reference's."""

from __future__ import annotations

import pytest
from gpu_tools import engine, greedy, ids, prompts, run

from tiny_models import assert_greedy

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # compiles for about half a minute


def test_float32(tiny_model, reference) -> None:
    path = tiny_model("qwen3")
    llm = engine(path, attention_backend="compile", enforce_eager=True, max_num_batched_tokens=40)
    batch = prompts()
    assert_greedy(reference(path), batch, ids(run(llm, batch)))
    drawn = run(llm, batch, greedy(temperature=0.8, seed=5))
    plain = engine(path, attention_backend="torch", enforce_eager=True)
    assert ids(drawn) == ids(run(plain, batch, greedy(temperature=0.8, seed=5)))
