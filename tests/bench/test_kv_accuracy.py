"""The accuracy of smaller caches: an equal one is exact, and each number means what it says."""

from __future__ import annotations

import json
import math

import pytest
import torch

from minivllm import LLM
from minivllm.bench import kv_accuracy
from minivllm.bench.kv_accuracy import Text, common_prefix, compare_caches, greedy_texts
from minivllm.cli import main
from tiny_models import make_model

QUESTIONS = kv_accuracy.QUESTIONS[:4]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("accuracy"), "llama")


def test_the_same_cache_agrees_everywhere(model, monkeypatch):
    monkeypatch.setitem(kv_accuracy.CACHES, "same", {})
    result = compare_caches(model, questions=QUESTIONS, tokens=9, caches=["same"])
    same = result.caches[0]
    assert (same.equal_texts, same.num_texts) == (4, 4)
    assert same.common_prefix == result.text_lengths
    assert same.same_best == same.num_positions == sum(result.text_lengths) > 20
    assert same.flip_margins == [] and same.closer_calls == 0
    assert same.logit_error == same.logprob_error.max == same.kl.max == 0
    assert same.logit_spread > 1


def test_8_bits_cost_more_than_bfloat16_and_runs_repeat(model):
    said = []
    first, again = (
        compare_caches(model, questions=QUESTIONS, tokens=24, progress=said.append)
        for _ in range(2)
    )
    assert first.to_dict()["caches"] == again.to_dict()["caches"]
    assert [text.split(" with a ")[1] for text in said] == [
        "plain cache",
        "bfloat16 cache",
        "fp8 cache",
    ] * 2
    bfloat16, fp8 = first.caches
    # 4 bits of mantissa for 8: sixteen times the rounding, more or less.
    assert 4 < fp8.logit_error / bfloat16.logit_error < 64
    assert 0 < bfloat16.kl.mean < fp8.kl.mean
    assert fp8.num_positions - fp8.same_best == len(fp8.flip_margins)
    assert fp8.flip_margins == sorted(fp8.flip_margins, reverse=True)
    assert json.loads(json.dumps(first.to_dict()))["caches"][1]["cache"] == "fp8"


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}])
def test_reading_a_text_gives_the_logits_that_wrote_it(model, options):
    llm = LLM(str(model), device="cpu", max_num_seqs=4, **options)
    for prompt, tokens in greedy_texts(llm, QUESTIONS, 24):
        best = kv_accuracy.next_logits(llm, prompt, tokens).topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > 1e-3
        assert clear.float().mean() > 0.9
        assert (best.indices[:, 0] == torch.tensor(tokens))[clear].all()


def test_errors_of_known_logits():
    plain = torch.tensor([[0.0, math.log(3.0)], [1.0, 0.0]])
    text = Text([5], [1, 1], plain)
    shifted = kv_accuracy._errors(text, plain + 7)
    assert shifted["squares"].max() < 1e-12 and shifted["kl"].abs().max() < 1e-12
    assert not shifted["flip"].any()
    other = kv_accuracy._errors(text, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    # 1/4, 3/4 against halves; equal logits: the lowest id is the best.
    assert other["flip"].tolist() == [True, False]
    assert other["margin"][0].item() == pytest.approx(math.log(3))
    assert other["logprob"].tolist() == pytest.approx([math.log(1.5), 0], abs=1e-6)
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert other["kl"].tolist() == pytest.approx([kl, 0], abs=1e-6)
    assert other["squares"][0].item() == pytest.approx((math.log(3) / 2) ** 2)


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


def test_command(model, tmp_path, capsys):
    file = tmp_path / "accuracy.json"
    arguments = ["bench", "kv-accuracy", "--model", str(model), "--tokens", "6"]
    assert main([*arguments, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "16 greedy texts of chat prompts" in out
    assert "fp8 cache against the plain one" in out and "same best token" in out
    record = json.loads(file.read_text())
    assert [cache["cache"] for cache in record["caches"]] == ["bfloat16", "fp8"]
    assert 0 <= record["caches"][1]["same_best_share"] <= 1
