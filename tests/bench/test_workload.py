"""Workloads are fixed to the last token, and their sizes are checked."""

from __future__ import annotations

import json

import pytest

from minivllm.bench.shapes import SHAPES, shape_directory
from minivllm.bench.workload import WORKLOADS, Workload, WorkloadSpec
from minivllm.config import ModelConfig


def test_standard_run_has_the_published_totals():
    workload = WORKLOADS["standard"].build(151936)
    assert len(workload.prompts) == 256
    assert workload.num_prompt_tokens == 142_827
    assert workload.num_output_tokens == 133_966
    assert workload.longest <= 2048
    params = workload.params()
    assert {p.temperature for p in params} == {0.6}
    assert all(p.ignore_eos for p in params)
    assert [p.max_tokens for p in params] == workload.output_lens


def test_compare_sizes_are_those_of_the_record():
    workload = WORKLOADS["compare-16"].build(49152)
    assert len(workload.prompts) == 16 and workload.temperature == 0
    assert all(16 <= len(p) <= 256 for p in workload.prompts)
    assert all(16 <= n <= 128 for n in workload.output_lens)


def test_seeded_and_inside_the_vocabulary():
    spec = WorkloadSpec("w", 5, (3, 9), (1, 4))
    assert spec.build(320) == spec.build(320)
    assert spec.build(320) != spec.changed(seed=1).build(320)
    assert max(max(p) for p in spec.build(7).prompts) <= 6


def test_changed_sizes_change_the_name():
    spec = WORKLOADS["mixed-32"]
    assert spec.changed() is spec
    assert spec.changed(num_requests=2).name == "mixed-32 (changed)"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"prompt_len": (0, 4)}, "prompt_len"),
        ({"output_len": (5, 4)}, "output_len"),
    ],
)
def test_bad_sizes_are_named(sizes, words):
    with pytest.raises(ValueError, match=words):
        WORKLOADS["single"].changed(**sizes)


def test_longest():
    assert Workload("w", [[1, 2], [3]], [1, 5]).longest == 6


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_configs_that_we_read(name):
    with shape_directory(name) as path:
        config = ModelConfig.from_dir(path)
        assert json.loads((path / "config.json").read_text()) == SHAPES[name]
    assert not path.exists()
    assert config.num_heads % config.num_kv_heads == 0


def test_qwen3_shape_has_the_kv_bytes_of_the_record():
    config = ModelConfig.from_dict(SHAPES["qwen3-0.6b-shape"])
    assert config.kv_bytes_per_token(2) == 114_688


def test_unknown_shape():
    with pytest.raises(ValueError, match="nosuch"), shape_directory("nosuch"):
        pass
