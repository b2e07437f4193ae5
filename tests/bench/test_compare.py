"""The comparison with transformers: the same work on both sides, and the same tokens."""

from __future__ import annotations

import io
import json
import sys

import pytest

from minivllm import bench
from minivllm.bench.compare import Comparison, compare, first_differences, single_request
from minivllm.cli import main
from minivllm.cli.bench_compare import report
from tiny_models import make_model

SPEC = bench.WorkloadSpec("small", 5, (3, 20), (2, 9), temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # An end token that greedy text does hit: both sides must go on as if it were any other.
    path = make_model(tmp_path_factory.mktemp("compare"), "llama", tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    config["eos_token_id"] = list(range(100))
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(100))}))
    return path


def test_both_sides_agree_and_useful_tokens_count(model):
    said = []
    workload = SPEC.build(320)
    result = compare(model, workload, batch_size=2, repeats=2, progress=said.append)
    assert result.num_agreeing == 5 and result.first_differences == {}
    assert result.output_tokens == sum(workload.output_lens)
    for rates in (result.ours, result.theirs, result.ours_single, result.theirs_single):
        assert len(rates) == 2 and min(rates) > 0
    order = [text.split(": ")[0] for text in said]
    one = ["minivllm, batch", "transformers, batch"]
    two = ["minivllm, one request", "transformers, one request"]
    assert order == (one + two) * 2  # interleaved: noise hits both
    assert json.loads(json.dumps(result.to_dict()))["num_agreeing"] == 5


def test_ratios_are_of_medians():
    result = Comparison(
        workload="w",
        num_requests=2,
        prompt_tokens=1,
        output_tokens=1,
        batch_size=8,
        threads=1,
        ours=[10.0, 30.0, 20.0],
        theirs=[5.0, 10.0, 100.0],
        ours_single=[3.0],
        theirs_single=[2.0],
        num_agreeing=1,
        first_differences={1: 7},
        environment={},
    )
    assert (result.ratio, result.ratio_single) == (2.0, 1.5)
    text = report(result)
    assert "2.00x" in text and "1.50x" in text
    assert "same greedy tokens: 1 of 2 requests" in text and "1 at token 7" in text


def test_first_differences():
    assert first_differences([[1, 2], [1, 2], [1]], [[1, 2], [1, 3], [1, 2]]) == {1: 1, 2: 1}


def test_single_is_the_longest_output():
    single = single_request(bench.Workload("w", [[1], [2, 3], [4]], [3, 8, 5]))
    assert (single.prompts, single.output_lens) == ([[2, 3]], [8])


@pytest.mark.parametrize("option", ["batch_size", "repeats"])
def test_bad_sizes(model, option):
    with pytest.raises(ValueError, match=option):
        compare(model, SPEC.build(320), **{option: 0})


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_person_who_waits_sees_a_bar(stream, model, monkeypatch):
    sizes = ["--num-requests", "1", "--prompt-len", "3", "3", "--output-len", "2", "2"]
    monkeypatch.setattr(sys, "stderr", stream())
    command = ["bench", "compare-transformers", "--model", str(model), *sizes]
    assert main([*command, "--repeat", "2", "--json", "-"]) == 0
    shown = sys.stderr.getvalue()
    if stream is Terminal:
        assert "0/8" in shown and "8/8" in shown and "transformers, one request: " in shown
    else:
        assert "/8" not in shown


def test_command(model, tmp_path, capsys):
    sizes = ["--num-requests", "3", "--prompt-len", "3", "9", "--output-len", "2", "4"]
    arguments = ["bench", "compare-transformers", "--model", str(model), *sizes, "--repeat", "1"]
    file = tmp_path / "c.json"
    assert main([*arguments, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "threads: " in out and "same greedy tokens: 3 of 3 requests" in out
    assert json.loads(file.read_text())["ratio"] > 0
