"""Steps made for timing are real ones, and leave nothing behind."""

from __future__ import annotations

import pytest

from minivllm import LLM, SamplingParams, bench
from minivllm.bench import engine_ladder, latency, step_time
from minivllm.bench.limit import Machine
from minivllm.bench.roofline import Ceilings
from tiny_models import assert_greedy

WORKLOAD = bench.WorkloadSpec("small", 4, (5, 20), (30, 40)).build(320)
MACHINE = Machine(Ceilings(1e10, 1e11, "cpu", "float32"), 4, 512)


@pytest.fixture
def path(tiny_model):
    return tiny_model("qwen3")


@pytest.fixture
def llm(path):
    return LLM(str(path), device="cpu", max_model_len=64, max_num_seqs=4, num_kvcache_blocks=24)


def still_good(llm, path, reference):
    """Greedy text is the reference's, from a prompt that the prefix cache had known before."""
    prompt = list(range(40))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert_greedy(reference(path), [prompt], [output.outputs[0].token_ids])
    assert llm.engine.scheduler.block_manager.num_used == 0
    return output


def test_contexts():
    workload = bench.Workload("w", [[0] * 3, [0] * 9, [0] * 5], [4, 2, 1])
    assert step_time.contexts_at(workload, 1) == [10, 4]
    assert step_time.contexts_at(workload, 2) == [5]
    assert step_time.contexts_at(workload, 4) == []


def test_plan():
    plan = step_time.decode_plan([33, 16, 1], block_size=16, num_blocks=5)
    assert plan.num_decode == 3 == plan.num_tokens
    assert [row.end for row in plan.rows] == [33, 16, 1]
    blocks = [block for row in plan.rows for block in row.block_table]
    assert [len(row.block_table) for row in plan.rows] == [3, 1, 1]
    assert sorted(blocks) == list(range(5))  # nobody's twice


def test_what_does_not_fit(llm):
    assert step_time.fits(llm, [64, 64, 64, 64])
    for contexts in ([65], [1] * 5, []):
        assert not step_time.fits(llm, contexts)
        with pytest.raises(ValueError, match="does not fit: max_num_seqs=4, max_model_len=64"):
            step_time.decode_seconds(llm, contexts)


def test_timing_a_step_leaves_no_trace(llm, path, reference):
    still_good(llm, path, reference)
    calls = []
    real = llm.engine.runner.ops.sample
    assert step_time.decode_seconds(llm, [64, 30, 1], calls=3) > 0
    assert llm.engine.runner.ops.sample is real and not calls
    assert still_good(llm, path, reference).num_cached_tokens == 0  # its blocks were written to


@pytest.mark.parametrize("depth", [0, 1])
def test_steady_step(llm, path, reference, depth):
    llm.engine.depth = depth
    steady = step_time.steady_step(llm, WORKLOAD, steps=6)
    assert steady is not None and steady.rows == 4
    prompts = WORKLOAD.num_prompt_tokens
    assert prompts + 4 * step_time.SKIPPED <= steady.context_tokens <= prompts + 4 * 20
    assert steady.wall_ms > 0 and steady.device_ms > 0
    assert steady.to_dict()["host_ms"] is None  # a CPU is host and device
    still_good(llm, path, reference)


def test_no_steady_step_where_there_is_no_decoding(llm):
    workload = bench.WorkloadSpec("w", 3, (5, 9), (1, 2)).build(320)
    assert step_time.steady_step(llm, workload) is None


def test_sweeps(llm, path, reference):
    rows = latency.sweep_batches(llm, MACHINE, [1, 3], context=12, tokens=4)
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["ms_per_token"] > 0 and row["device_ms"] > 0 for row in rows)
    assert rows[1]["limit_ms"] > rows[0]["limit_ms"] > 0
    rows = latency.sweep_prompts(llm, MACHINE, [7, 30])
    assert [(row["prompts"], row["length"]) for row in rows] == [(1, 7), (4, 7), (1, 30), (4, 30)]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(
            1e3 * row["prompts"] * row["length"] / row["ms"]
        )
    with pytest.raises(ValueError, match="max_model_len"):
        latency.sweep_prompts(llm, MACHINE, [64])
    assert latency.fitting(llm, [1, 2, 4, 8], context=32, tokens=16) == [1, 2, 4]  # 4 seats
    assert latency.fitting(llm, [1, 2, 4, 8], context=100, tokens=16) == []
    llm.stats.clear()
    with pytest.raises(ValueError, match="a step of 8 rows"):
        latency.sweep_batches(llm, MACHINE, [1, 8], context=12, tokens=4)
    assert not llm.stats.steps  # said before anything ran
    still_good(llm, path, reference)


def test_a_rung_changes_the_engine_only_while_it_runs(llm):
    llm.engine.depth = 0
    llm.engine.runner.graphs = graphs = object()  # never replayed by this rung
    rung = engine_ladder.Rung("r", graphs=False, depth=1, most_requests=2, repeats=1)
    result = engine_ladder.measure_rung(llm, rung, WORKLOAD)
    assert result.settings["stage"] == "r" and result.settings["depth"] == 1
    assert result.settings["graphs"] is False and result.num_requests == 2
    assert llm.engine.depth == 0 and llm.engine.runner.graphs is graphs


def test_rungs_of_equal_options_share_an_engine(llm, monkeypatch):
    built = []

    def build(options):
        built.append(options)
        return llm

    monkeypatch.setattr(engine_ladder, "measure_rung", lambda llm, rung, load: _result(rung))
    results = engine_ladder.climb(build, WORKLOAD, "cuda")
    assert [result.settings["stage"] for result in results] == [
        "torch eager", "compile", "triton eager", "+ graphs", "+ overlap", "+ fp8 KV",
    ]  # fmt: skip
    assert [options.get("kv_cache_dtype") for options in built] == [None, None, None, "fp8"]
    backends = [options.get("attention_backend") for options in built]
    assert backends == ["torch", "compile", None, None]


def _result(rung):
    class Result:
        settings = {"stage": rung.name}  # noqa: RUF012
        output_tokens_per_s = 1.0

    return Result()
