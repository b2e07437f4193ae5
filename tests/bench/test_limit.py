"""The roofline's arithmetic, by numbers that were worked out apart from it."""

from __future__ import annotations

import pytest

from minivllm.bench.limit import Machine, decode_limit, prefill_limit, run_limit
from minivllm.bench.roofline import Ceilings
from minivllm.bench.shapes import shape_directory
from minivllm.bench.workload import WORKLOADS, Workload
from minivllm.config import ModelConfig

H200 = Ceilings(4.54e12, 812e12, "cuda", "bfloat16")
WEIGHTS = 0.881e9 + 0.311e9  # layers and head of the shape, in bytes


@pytest.fixture(scope="module")
def qwen() -> ModelConfig:
    with shape_directory("qwen3-0.6b-shape") as path:
        return ModelConfig.from_dir(path)


def test_standard_run_on_an_h200(qwen):
    """As published with the workload: 3.05 s of KV, 0.27 s of weights, 0.17 s of prefill."""
    workload = WORKLOADS["standard"].build(qwen.vocab_size)
    limit = run_limit(qwen, workload, Machine(H200, 2, 114_688))
    assert limit.decode_seconds == pytest.approx(3.05 + 0.27, abs=0.02)
    assert limit.prefill_seconds == pytest.approx(0.17, abs=0.01)
    assert limit.output_tokens_per_s == pytest.approx(38_400, rel=0.01)
    # 8-bit keys and values with a scale for each token and head: a half and a sixty-fourth more.
    halved = run_limit(qwen, workload, Machine(H200, 2, 114_688 // 2 + 2 * 28 * 8 * 4))
    assert halved.decode_seconds == pytest.approx(3.05 * (0.5 + 1 / 64) + 0.27, abs=0.03)
    assert halved.prefill_seconds == limit.prefill_seconds


def test_a_decode_step_is_bound_by_bytes_or_by_arithmetic(qwen):
    machine = Machine(H200, 2, 114_688)
    expected = (WEIGHTS + 114_688 * 1512) / 4.54e12
    assert decode_limit(qwen, [1000, 512], machine) == pytest.approx(expected, rel=1e-3)
    slow = Machine(Ceilings(4.54e12, 1e9, "cuda", "bfloat16"), 2, 114_688)
    flops = 2 * 2 * WEIGHTS / 2 + 4 * 28 * 2048 * 1512
    assert decode_limit(qwen, [1000, 512], slow) == pytest.approx(flops / 1e9, rel=1e-3)


def test_a_first_token_costs_no_decode_step(qwen):
    machine = Machine(H200, 2, 114_688)
    one = run_limit(qwen, Workload("one", [[1, 2, 3]], [1]), machine)
    assert one.decode_seconds == 0
    assert one.prefill_seconds == prefill_limit(qwen, [3], machine) > 0
    two = run_limit(qwen, Workload("two", [[1, 2, 3], [1]], [1, 3]), machine)
    steps = decode_limit(qwen, [2], machine) + decode_limit(qwen, [3], machine)
    assert two.decode_seconds == pytest.approx(steps)
