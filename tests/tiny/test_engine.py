"""The bundled model in the engine: the same tokens as transformers, shared prompts, quick start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.hub import resolve_model
from minivllm.tiny import MODEL_DIR
from tiny_models import MARGIN, Reference

OPENINGS = (
    "boy girl cat dog fox bear mouse frog pig owl lion cow hen goat bird king fish horse duck"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny")


def prompts(llm: LLM) -> list[list[int]]:
    """64 prompts: questions as chat, story openings as text."""
    tokenizer = llm.get_tokenizer()
    lines = (MODEL_DIR.parent / "eval_questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    chats = [tokenizer.encode_chat([{"role": "user", "content": q}]) for q in questions]
    stories = [tokenizer.encode(f"Once upon a time, there was a {x}") for x in OPENINGS.split()]
    more = [tokenizer.encode(f"One day a little {x} said:") for x in OPENINGS.split()]
    return (chats[:40] + stories + more)[:64]


def test_greedy_tokens_equal_transformers(llm: LLM) -> None:
    """64 prompts, 64 tokens each; one forward proves a whole answer, see tests/test_smollm2.py."""
    given = prompts(llm)
    assert len(given) == 64
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    answers = [o.outputs[0].token_ids for o in llm.generate(given, params, use_tqdm=False)]
    reference = Reference(resolve_model("tiny"))
    margins = []
    for prompt, answer in zip(given, answers, strict=True):
        best = reference.logits([*prompt, *answer])[len(prompt) - 1 : -1].topk(2)
        gap = best.values[:, 0] - best.values[:, 1]
        wrong = best.indices[:, 0] != torch.tensor(answer)
        assert not wrong.any() or gap[wrong][0] < MARGIN, (prompt, answer)
        margins.append(gap)
    assert torch.cat(margins).median() > 1


def test_a_shared_system_prompt_is_a_prefix_hit_and_the_same_text(llm: LLM) -> None:
    system = "You are a friendly storyteller for small children. " * 30
    tokenizer = llm.get_tokenizer()
    ids = [
        tokenizer.encode_chat(
            [{"role": "system", "content": system}, {"role": "user", "content": question}]
        )
        for question in ("What sound does a cow make?", "What color is the sky?")
    ]
    assert min(len(prompt) for prompt in ids) > 300
    params = SamplingParams(temperature=0, max_tokens=40)
    llm.reset_prefix_cache()
    miss = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in ids]
    hit = llm.generate(ids, params, use_tqdm=False)
    assert miss[0].num_cached_tokens == 0 and miss[1].num_cached_tokens >= 300
    assert all(output.num_cached_tokens >= 300 for output in hit)
    assert [o.outputs[0].text for o in hit] == [o.outputs[0].text for o in miss]
    assert all(o.finished and o.outputs[0].finish_reason == "stop" for o in hit)


def test_a_story_ends_by_itself_without_transformers() -> None:
    """The command line, in a process of its own: transformers (5 s to import) is never loaded."""
    code = (
        "import sys\n"
        "from minivllm.cli import main\n"
        "code = main(['generate', 'Once upon a time', '--seed', '1', '--json'])\n"
        "assert not code and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert '"stop"' in done.stdout
