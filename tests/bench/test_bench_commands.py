"""The commands end to end on a CPU: what they write is what lessons read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from minivllm.bench import ladder, offline, record_gpu
from minivllm.cli import bench_options, main
from minivllm.cli.parser import build_parser, parse
from minivllm.config import ModelConfig
from minivllm.engine.step_graphs import StepGraphs

SIZES = ["--num-requests", "3", "--prompt-len", "4", "8", "--output-len", "3", "14"]


@pytest.fixture
def model(tiny_model):
    return ["--model", str(tiny_model("qwen3")), "--device", "cpu"]


def record_of(arguments, file):
    assert main([*arguments, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert {"cpu", "threads", "packages"} <= set(record["environment"])
    return record


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_offline(kv, model, tmp_path, capsys):
    flags = ["--repeat", "1", "--num-kvcache-blocks", "20", "--kv-cache-dtype", kv]
    record = record_of(["bench", "offline", *model, *SIZES, *flags], tmp_path / "r.json")
    roof = record["roofline"]
    reached = record["best"]["output_tokens_per_s"] / roof["output_tokens_per_s"]
    assert roof["share"] == pytest.approx(reached)
    assert roof["bytes_per_s"] > 0 and roof["dtype"] == "float32"
    assert record["graphs"] is None  # no card
    assert record["decode_step"]["1"]["rows"] == 3 and "100" not in record["decode_step"]
    assert record["steady_step"] is None or record["steady_step"]["rows"] >= 1
    start = record["start_seconds"]
    assert start["total"] == pytest.approx(start["import torch"] + start["load"])
    text = capsys.readouterr().out
    assert "roofline" in text and "decode step 1 (3 rows" in text


def test_the_hosts_share_is_a_gpus():
    root = Path(__file__).parents[2]
    record = json.loads((root / "lessons" / "data" / "offline.json").read_text())
    assert "host not overlapped" in offline.lines(record)
    record["steady_step"]["host_ms"] = None
    last = offline.lines(record).splitlines()[-1]
    assert last == f"steady step (256 rows): {record['steady_step']['wall_ms']:.2f} ms"


def test_what_capturing_cost_is_told():
    decode, prefill = SimpleNamespace(buckets=[1, 2]), SimpleNamespace(buckets=[64])
    graphs = StepGraphs(decode, prefill, seconds=1.5, num_bytes=7)
    llm = SimpleNamespace(engine=SimpleNamespace(runner=SimpleNamespace(graphs=graphs)))
    told = {"count": 3, "capture_seconds": 1.5, "capture_bytes": 7}
    assert offline.describe_graphs(llm) == told


def test_latency_and_prefill(model, tmp_path, capsys):
    flags = ["--batch", "1", "2", "--context", "6", "--tokens", "2"]
    record = record_of(["bench", "latency", *model, *flags], tmp_path / "l.json")
    assert [row["batch"] for row in record["rows"]] == [1, 2]
    assert record["settings"]["max_num_seqs"] == 2 and "roofline" in record
    flags = ["--length", "5", "9", "--max-num-seqs", "2"]
    record = record_of(["bench", "prefill", *model, *flags], tmp_path / "p.json")
    assert [(row["prompts"], row["length"]) for row in record["rows"]] == [
        (1, 5), (2, 5), (1, 9), (2, 9),
    ]  # fmt: skip
    assert "tflop_per_s" in capsys.readouterr().out


def test_sizes_that_nobody_gave_fit_the_model(model, tmp_path):
    short = [*model, "--max-model-len", "300", "--max-num-seqs", "2"]
    record = record_of(["bench", "prefill", *short], tmp_path / "p.json")
    assert [row["length"] for row in record["rows"]] == [128, 128]
    flags = ["--max-model-len", "100"]
    record = record_of(["bench", "prefill", *short, *flags], tmp_path / "p.json")
    assert [row["length"] for row in record["rows"]] == [99, 99]
    flags = ["--max-model-len", "80", "--tokens", "8"]
    record = record_of(["bench", "latency", *short, *flags], tmp_path / "l.json")
    assert [row["batch"] for row in record["rows"]] == [1, 2]
    assert record["settings"]["max_model_len"] == 80


@pytest.mark.parametrize("command", ["offline", "ladder"])
def test_the_workload_that_nobody_named_fits_the_model(command, model):
    def build(*flags, **engine):
        args = parse(build_parser(), ["bench", command, *model, *flags])
        specs = bench_options.workload_specs(args)
        return bench_options.build_workload(specs, engine, config).name, engine["max_model_len"]

    own = {"offline": "standard", "ladder": "short"}[command]
    raw = json.loads((Path(model[1]) / "config.json").read_text())
    config = ModelConfig.from_dict({**raw, "max_position_embeddings": 4096})
    assert build()[0] == own and 1024 < build()[1] < 4096
    assert build(max_model_len=1024) == ("mixed-32", 1024)
    assert build("--num-requests", "3", max_model_len=512)[0] == "mixed-32 (changed)"
    config = dataclasses.replace(config, max_position=512)
    assert build()[0] == "mixed-32"
    with pytest.raises(ValueError, match=r"has \d+ tokens, .* may have 512"):
        build("--workload", own)
    with pytest.raises(ValueError, match="may have 512"):
        build("--prompt-len", "600", "600")


def test_ladder(model, tmp_path, capsys):
    file = tmp_path / "ladder.json"
    record_of(["bench", "ladder", *model, *SIZES, "--num-kvcache-blocks", "20"], file)
    bars = ladder.recorded_rungs(file)
    assert list(bars) == ["torch eager", "sdpa eager", "+ overlap", "+ fp8 KV"]
    assert all(value > 0 for value in bars.values())
    assert "+ overlap" in capsys.readouterr().out
    assert ladder.recorded_rungs(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latency", "--batch", "0"], "--batch must be at least 1"),
        (["latency", "--context", "0"], "--context"),
        (["prefill", "--length", "-1"], "--length"),
        (["prefill", "--model", "tiny", "--length", "5", "1024"], "has 1025 tokens"),
        (["latency", "--model", "tiny", "--context", "1000"], "may have 1024"),
        (["ladder", "--kv-cache-dtype", "fp8"], "the rungs of the ladder set kv_cache_dtype"),
        (["ladder", "--json", "/nosuch/file.json"], "/nosuch/file.json"),
    ],
)
def test_wrong_input(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_kernels_need_a_card(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "kernels"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


# -- recording -------------------------------------------------------------------------------------


def test_parts_fit_the_commands(tmp_path):
    """Every child's command line is one that its program takes."""
    for small in (True, False):
        for part in record_gpu.parts(tmp_path, "tiny", "cpu", small):
            if part.command[0] == "minivllm":
                args = parse(build_parser(), part.command[1:])
                assert args.json == str(tmp_path / f"{part.name}.json")
    names = " ".join(part.name for part in record_gpu.parts(tmp_path, "tiny", "cpu"))
    assert names == "offline offline_again offline_fp8 latency prefill ladder stages kernels"


def test_a_part_that_fails_or_hangs_costs_its_own_file_only(tmp_path, monkeypatch, capsys):
    def fake(out, model, device, small):
        write = f"open({str(out / 'good.json')!r}, 'w').write('{{}}')"
        half = f"open({str(out / 'half.json')!r}, 'w').write('{{'); raise ValueError"
        return [
            record_gpu.Part("half", ("timeit", "-n1", "-r1", half), 60),
            record_gpu.Part("hang", ("timeit", "-n1", "-r1", "import time; time.sleep(99)"), 1),
            record_gpu.Part("good", ("timeit", "-n1", "-r1", write), 60),
        ]

    monkeypatch.setattr(record_gpu, "parts", fake)
    assert record_gpu.main(["--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "exit code 1" in lines[0] and "stopped after 1 s" in lines[1] and "ok" in lines[2]
    assert (tmp_path / "good.json").exists() and not (tmp_path / "half.json").exists()
    assert record_gpu.main(["--out", str(tmp_path), "--budget", "2", "--parts", "good"]) == 1
    assert "no time left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        record_gpu.main(["--out", str(tmp_path), "--parts", "nosuch"])


@pytest.mark.slow
def test_recording_on_a_cpu(tmp_path, tiny_model):
    model = str(tiny_model("qwen3"))
    done = ["offline", "offline_again", "offline_fp8", "latency", "prefill", "ladder"]
    flags = ["--model", model, "--device", "cpu", "--small", "--parts", *done]
    assert record_gpu.main(["--out", str(tmp_path), *flags]) == 0, (
        tmp_path / "record.log"
    ).read_text()
    for name in done:
        assert json.loads((tmp_path / f"{name}.json").read_text())["environment"]
