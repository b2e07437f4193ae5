"""Measurements count what happened; no test asserts a duration."""

from __future__ import annotations

import dataclasses
import json

import pytest

from minivllm import LLM, bench
from minivllm.bench.measure import measure
from minivllm.bench.result import Latency
from minivllm.cli import main
from tiny_models import make_model

SMALL = bench.WorkloadSpec("small", 4, (5, 20), (2, 6))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("bench"), "qwen3", tokenizer=False))


@pytest.fixture
def llm(model):
    return LLM(model, max_model_len=64, num_kvcache_blocks=40, kvcache_block_size=4)


def test_counts(llm):
    workload = SMALL.build(320)
    result = bench.run(llm, workload)
    assert result.num_requests == 4
    assert result.prompt_tokens == workload.num_prompt_tokens
    assert result.output_tokens == workload.num_output_tokens
    # The last token of each request is only reported: it never goes through the model.
    assert result.tokens_computed == result.prompt_tokens + result.output_tokens - 4
    assert result.prefill_tokens + result.decode_tokens == result.tokens_computed
    assert (result.num_blocks, result.block_size) == (40, 4)
    assert 0 < result.peak_kv_bytes < result.kv_bytes
    assert result.peak_kv_bytes * result.num_blocks == result.kv_bytes * result.peak_blocks
    assert result.cached_tokens == 0  # the warm-up's prompt is the first one's beginning
    assert result.settings["dtype"] == "float32" and result.settings["max_model_len"] == 64


def test_rates_are_ratios_of_what_is_recorded(llm):
    result = bench.run(llm, SMALL.build(320))
    assert result.output_tokens_per_s == result.output_tokens / result.seconds
    assert result.decode_tokens_per_s == result.decode_tokens / result.decode_seconds
    assert result.prefill_seconds + result.decode_seconds <= result.seconds
    assert 0 < result.ttft.p50 <= result.ttft.p99 <= result.seconds
    assert 0 < result.inter_token.p50 <= result.inter_token.p99


def test_repeats_start_from_an_empty_cache_and_the_fastest_counts(llm):
    results = bench.measure_repeats(llm, SMALL.build(320), repeats=3)
    assert [r.cached_tokens for r in results] == [0, 0, 0]
    assert len({r.tokens_computed for r in results}) == 1
    fastest = max(r.output_tokens_per_s for r in results)
    assert bench.best_of(results).output_tokens_per_s == fastest


def test_hits_show_where_the_cache_is_kept(llm):
    workload = SMALL.build(320)
    measure(llm, workload)
    again = measure(llm, workload)
    assert again.cached_tokens > 0
    expected = again.prompt_tokens + again.output_tokens - 4 - again.cached_tokens
    assert again.tokens_computed == expected


def test_preemption_shows(model):
    llm = LLM(model, max_model_len=64, num_kvcache_blocks=9, kvcache_block_size=4)
    workload = bench.WorkloadSpec("w", 4, (8, 8), (24, 24)).build(320)
    result = bench.run(llm, workload)
    assert result.preemptions > 0 and result.output_tokens == 96
    assert result.tokens_computed > result.prompt_tokens + result.output_tokens - 4


def test_names_and_bad_names(llm):
    with pytest.raises(ValueError, match="mixed-33"):
        bench.run(llm, workload="mixed-33")
    with pytest.raises(ValueError, match="repeats"):
        bench.run(llm, SMALL.build(320), repeats=0)


def test_a_workload_that_would_be_cut_is_refused(llm, model):
    with pytest.raises(ValueError, match="max_model_len holds 64"):
        bench.run(llm, workload="mixed-32")
    small = LLM(model, max_model_len=64, num_kvcache_blocks=3, kvcache_block_size=4)
    with pytest.raises(ValueError, match="the KV pool holds 12"):
        bench.run(small, SMALL.build(320))


def test_a_failure_leaves_the_engine_empty(llm):
    workload = bench.Workload("bad", [[1, 2, 3], [4, 999]], [2, 2])
    with pytest.raises(ValueError, match="999"):
        measure(llm, workload)
    assert not llm.has_unfinished()
    assert bench.run(llm, SMALL.build(320)).output_tokens > 0


def test_latency():
    assert Latency.of([]) == Latency(0.0, 0.0, 0.0)
    latency = Latency.of([float(i) for i in range(101)])
    assert (latency.mean, latency.p50, latency.p99) == (50.0, 50.0, 99.0)


def test_result_is_json_and_a_table(llm):
    results = bench.measure_repeats(llm, SMALL.build(320), repeats=2)
    data = json.loads(json.dumps(results[0].to_dict()))
    assert {"output_tokens_per_s", "ttft", "inter_token", "peak_kv_usage", "environment"} <= set(
        data
    )
    text = bench.table(results)
    assert text.count("*") == 2 and "run 2" in text
    slow = Latency(12345.678, 12345.678, 12345.678)
    many = [dataclasses.replace(r, ttft=slow, num_blocks=10**6) for r in results * 5]
    text = bench.table(many)
    assert "run 10" in text and max(map(len, text.splitlines())) <= 100
    assert text.count("12,345,678.0") == 3 * len(many)


def test_offline_command(model, tmp_path, capsys):
    sizes = ["--num-requests", "3", "--prompt-len", "4", "8", "--output-len", "2", "3"]
    file = tmp_path / "r.json"
    arguments = ["bench", "offline", "--model", model, *sizes, "--num-kvcache-blocks", "20"]
    assert main([*arguments, "--repeat", "2", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    assert "output tokens/s" in captured.out and "3 requests" in captured.err
    record = json.loads(file.read_text())
    assert record["best"]["num_requests"] == 3 and record["best"]["settings"]["max_model_len"] <= 11
    assert max(record["output_tokens_per_s"]) == record["best"]["output_tokens_per_s"]
    assert main([*arguments, "--repeat", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["num_requests"] == 3


def test_offline_command_with_a_shape(monkeypatch, capsys):
    from minivllm.bench.shapes import SHAPES

    tiny = {**SHAPES["qwen3-0.6b-shape"], "hidden_size": 32, "num_hidden_layers": 1}
    tiny |= {"vocab_size": 100, "intermediate_size": 32}
    monkeypatch.setitem(SHAPES, "small-shape", tiny)
    sizes = ["--num-requests", "2", "--prompt-len", "4", "8", "--output-len", "2", "3"]
    arguments = ["bench", "offline", "--model", "small-shape", *sizes, "--repeat", "1"]
    assert main([*arguments, "--max-num-seqs", "2"]) == 0
    assert "small-shape on cpu; standard (changed): 2 requests" in capsys.readouterr().err
    assert main([*arguments, "--load-format", "safetensors"]) == 2
