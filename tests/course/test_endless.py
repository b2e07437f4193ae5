"""A decode loop that never ends stops with a message: in the example, the tests and a stage."""

import pytest
import torch

from minivllm.course.engine_check import run_stage
from minivllm.course.runner import run_tests
from minivllm.course.table import load_course

COURSE = load_course()
NAIVE = """
import torch

def generate_naive(model, ids, max_new, eos_ids=()):
    tokens = list(ids)
    while len(ids) < 1000:
        token = int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens += GROWTH
    return tokens
"""
CACHED = """
import torch

def generate_cached(model, cache, ids, max_new, eos_ids=()):
    cache.reset()
    new, step = [], list(ids)
    while len(ids) < 1000:
        token = int(model(torch.tensor([step]), cache)[0, -1].argmax())
        new += GROWTH
        step = [token]
    return new
"""


@pytest.mark.parametrize("growth", ["[token]", "[]"])
@pytest.mark.parametrize(("task", "answer"), [("ch01.1", NAIVE), ("ch06.2", CACHED)])
def test_plain_pytest_and_the_engine_end(task, answer, growth, tmp_path):
    path = tmp_path / COURSE.chapter(task).file
    path.write_text(answer.replace("GROWTH", growth), encoding="utf-8")
    run = run_tests(COURSE, [task[:4]], str(tmp_path), ["--engine", "--task", task], seconds=200)
    (found,) = run.progress["tasks"]
    said = {test["test"]: test["text"] for test in found["tests"]}
    example = next(said[name] for name in said if name.startswith("worked_example"))
    assert "raised TimeoutError: called 50 times for " in example
    assert " tokens: does the loop end?" in example
    engine = said[f"engine[{task}]"]
    assert "raised TimeoutError: called 83 times for 24 tokens: does the loop end?" in engine
    assert all("does the loop end?" in text for text in said.values())


def test_wasted_calls_are_no_endless_loop(tiny_model):
    """Twice the calls still end, with the same greedy tokens: the visible tests count the calls."""

    def twice(model, ids, max_new, eos_ids=()):
        tokens = list(ids)
        for _ in range(max_new):
            model(torch.tensor([tokens]))
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[len(ids) :]

    model = str(tiny_model("qwen3"))
    mine = run_stage("s1_naive", model, {"generate_naive": twice})
    # The prompts stand twice: greedy, then sampled, where each call draws.
    count = len(mine.prompts) // 2
    assert mine.tokens[:count] == run_stage("s1_naive", model, {}).tokens[:count]
