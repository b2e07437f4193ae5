"""`bench.run` over stages: what is counted is right, what is timed is consistent."""

from __future__ import annotations

import json

import pytest

from minivllm import bench, stages
from minivllm.bench import ladder, record_stages, roofline
from minivllm.config import ModelConfig
from tiny_models import FAMILIES

SMALL = bench.WorkloadSpec("small", 3, (4, 9), (2, 6))


@pytest.fixture
def build(tiny_model):
    def make(name, **options):
        if name == "engine":
            options.setdefault("num_kvcache_blocks", 32)
        return stages.build(name, str(tiny_model("qwen3")), device="cpu", max_len=64, **options)

    return make


@pytest.mark.parametrize("name", stages.NAMES)
def test_counts(name, build):
    stage, load = build(name), SMALL.build(320)
    result = bench.run(stage, load)
    assert result.output_tokens == load.num_output_tokens
    assert result.prompt_tokens == result.prefill_tokens == load.num_prompt_tokens
    assert result.decode_tokens == load.num_output_tokens - 3
    pairs = list(zip(map(len, load.prompts), load.output_lens, strict=True))
    expected = sum(p + n - 1 for p, n in pairs)
    if name == "s1_naive":
        expected = sum(n * p + n * (n - 1) // 2 for p, n in pairs)
    assert result.tokens_computed == expected
    assert result.kv_bytes == stage.kv_bytes
    assert result.settings["stage"] == name and result.settings["mine"] == []
    assert result.environment["device"] == "cpu"
    assert json.loads(json.dumps(result.to_dict()))["workload"] == "small"


def test_kv_of_the_contiguous_cache(build):
    stage, load = build("s2_kv"), SMALL.build(320)
    result = bench.run(stage, load)
    token = stage.model.config.kv_bytes_per_token(4)
    longest = max(len(p) + n - 1 for p, n in zip(load.prompts, load.output_lens, strict=True))
    assert result.peak_kv_bytes == longest * token
    assert result.kv_bytes == 64 * token


@pytest.mark.parametrize("name", ["s1_naive", "s2_kv"])
def test_times_add_up(name, build):
    result = bench.run(build(name), SMALL.build(320), repeats=2)
    total = result.prefill_seconds + result.decode_seconds
    assert 0 < total <= result.seconds
    assert 0 < result.ttft.p50 <= result.ttft.p99 <= result.seconds
    assert result.inter_token.p50 > 0 and result.num_steps == result.output_tokens


def test_refused(build):
    stage = build("s1_naive")
    with pytest.raises(ValueError, match="max_len=64"):
        bench.run(stage, "ladder")
    with pytest.raises(ValueError, match="'mixed-33' is unknown"):
        bench.run(stage, "mixed-33")


def test_token_latency(build):
    found = bench.token_latency(build("s2_kv"), [4, 20], tokens=3)
    assert len(found) == 2 and all(seconds > 0 for seconds in found)


def test_ladder_grows_and_replaces(build, tmp_path):
    path = tmp_path / "work" / "ladder.json"
    load = SMALL.build(320)
    naive, cached = (bench.run(build(name), load) for name in ("s1_naive", "s2_kv"))
    assert list(ladder.add(cached, path=path)) == ["s2_kv"]
    assert list(ladder.add(naive, path=path)) == ["s1_naive", "s2_kv"]  # the course's order
    again = bench.run(build("s1_naive"), load)
    assert ladder.add(again, path=path)["s1_naive"] == again.output_tokens_per_s
    assert len(json.loads(path.read_text())) == 2


def test_ladder_keeps_machines_and_workloads_apart(build, tmp_path):
    path = tmp_path / "ladder.json"
    result = bench.run(build("s2_kv"), SMALL.build(320))
    ladder.add(result, path=path)
    entries = json.loads(path.read_text())
    entries[0]["environment"]["cpu"] = "another"
    path.write_text(json.dumps(entries))
    assert ladder.bars(result, path) == {}
    path.write_text("[{")  # cut short
    assert list(ladder.add(result, path=path)) == ["s2_kv"]


def test_record(tiny_model, tmp_path, capsys):
    path = tmp_path / "data" / "stages.json"
    command = ["--device", "cpu", "--repeats", "1", "--out", str(path)]
    command += ["--model", str(tiny_model("llama")), "--shape", str(tiny_model("qwen3"))]
    assert record_stages.main([*command, "--lengths", "4", "12"]) == 0
    record = ladder.recorded(path)
    assert list(ladder.recorded_bars(path=path)) == list(stages.NAMES)
    assert record["latency"]["lengths"] == [4, 12]
    assert all(len(curve) == 2 for curve in record["latency"]["seconds"].values())
    assert record["roofline"]["flops_per_s"] > 0
    assert record["runs"][0]["tokens_computed"] > record["runs"][1]["tokens_computed"]
    assert ladder.recorded(tmp_path / "none.json") == {}
    assert ladder.recorded_bars(path=tmp_path / "none.json") == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters(family, tiny_model, reference):
    path = tiny_model(family)
    model = reference(path).model
    counted = roofline.parameters(ModelConfig.from_dir(path))
    assert sum(counted.values()) == sum(p.numel() for p in model.parameters())


def test_step_work():
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 10,
            "hidden_size": 4,
            "intermediate_size": 6,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 8,
            "tie_word_embeddings": True,
        }
    )
    products = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6  # q, k and v, o, MLP
    flops, moved = roofline.step_work(config, tokens=1, context=2, element_size=4)
    assert flops == 2 * (products + 40) + 4 * 4 * 3
    assert moved == 4 * (products + 12 + 40) + 3 * (2 * 2 * 4)
    # Three tokens at once: the weights are read once all the same.
    flops3, moved3 = roofline.step_work(config, tokens=3, context=0, element_size=4)
    assert flops3 == 2 * (3 * products + 40) + 4 * 4 * 6
    assert moved3 == moved


def test_ceilings():
    import torch

    found = roofline.ceilings(torch.device("cpu"), read_bytes=1 << 20, side=64, seconds=0.01)
    assert found.bytes_per_s > 0 and found.dtype == "float32"
    assert found.attainable(found.ridge / 2) == pytest.approx(found.flops_per_s / 2)
    assert found.attainable(found.ridge * 2) == found.flops_per_s
