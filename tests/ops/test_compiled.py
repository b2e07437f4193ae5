"""The compiled forms against the plain ones, at several sizes, with one compilation for all."""

from __future__ import annotations

import inspect

import pytest
import torch

from minivllm.ops import activations, compiled, compose, kv, norms, rope
from minivllm.ops.table import BACKENDS, UNITS

WHY_NOT = compiled.obstacle("cpu", None)
COUNTS = (16, 1, 7, 64, 33)  # 16 heads and a hidden size of 64: equal by accident, not for ever
HIDDEN, HEADS, KV_HEADS, DIM = 64, 16, 2, 8
plain_store = compose.compose_qk_norm_rope_store(norms.rms_norm, rope.apply_rope, kv.store_kv)


@pytest.fixture
def fresh() -> None:
    """Nothing compiled before counts."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiles(test):
    """Slow: a machine's first call takes seconds a form; later ones find a cache on the disk."""
    marks = (
        pytest.mark.slow,
        pytest.mark.skipif(WHY_NOT is not None, reason=f"torch.compile {WHY_NOT}"),
        pytest.mark.usefixtures("fresh"),
    )
    for mark in marks:
        test = mark(test)
    return test


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def same(function, plain, make) -> None:
    """Equal results at all counts; one kernel for 1 token and one for any other number."""
    with torch.inference_mode():
        for count in COUNTS:
            got, want = function(*make(count)), plain(*make(count))
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert compilations() == 2


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@compiles
def test_norms() -> None:
    weight = seeded(HIDDEN, seed=9)
    same(compiled.rms_norm, norms.rms_norm, lambda n: (seeded(n, HIDDEN), weight, 1e-6))


@compiles
def test_add_norm() -> None:
    def make(count: int) -> tuple:
        parts = (seeded(count, HIDDEN, seed=seed) for seed in (1, 2))
        return (*parts, seeded(HIDDEN, seed=9), 1e-6)

    same(compiled.add_rms_norm, norms.add_rms_norm, make)


@compiles
def test_silu_mul() -> None:
    same(compiled.silu_mul, activations.silu_mul, lambda n: (seeded(n, 2 * HIDDEN),))


@compiles
@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope_store(normed: bool) -> None:
    """As the model calls it: q, k and v are parts of one packed product; -1 stores nothing."""
    cos, sin = rope.rope_table(DIM, 200, 1e4)
    weights = (seeded(DIM, seed=7), seeded(DIM, seed=8)) if normed else (None, None)

    def run(function, count: int):
        packed = seeded(count, (HEADS + 2 * KV_HEADS) * DIM).unflatten(-1, (-1, DIM))
        q, k, v = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        cache = torch.zeros(2, 20, 4, KV_HEADS, DIM)
        slots = torch.arange(count) + 3
        slots[-1] = -1 if count > 1 else 3
        q = function(q, k, v, *weights, 1e-6, torch.arange(count) * 2, cos, sin, *cache, slots)
        return q, cache

    same(
        lambda count: run(compiled.qk_norm_rope_store, count),
        lambda count: run(plain_store, count),
        lambda count: (count,),
    )


def test_signatures_are_those_of_the_torch_forms() -> None:
    plain = {**UNITS, "qk_norm_rope_store": plain_store}
    for fused in BACKENDS["compile"]():
        parameters = inspect.signature(plain[fused.entry]).parameters.values()
        expected = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
        assert list(inspect.signature(fused.function).parameters) == expected


@compiles
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_engine_writes_the_same_text(family: str, tiny_model, reference) -> None:
    """With and without q/k norm; whole prompts, chunks and hits; the torch backend's tokens."""
    from minivllm import LLM, SamplingParams
    from tiny_models import assert_greedy

    path = tiny_model(family)
    options = {"device": "cpu", "max_model_len": 64, "num_kvcache_blocks": 32}
    options |= {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    batch = [
        [(7 * i + 3 * j) % 320 for j in range(length)] for i, length in enumerate((1, 5, 20, 33))
    ]
    texts = {}
    for backend in ("torch", "compile"):
        llm = LLM(str(path), attention_backend=backend, **options)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(batch, params, use_tqdm=False)
            texts[backend] = [output.outputs[0].token_ids for output in outputs]
            assert_greedy(reference(path), batch, texts[backend])
        assert llm.backend == backend
    assert texts["compile"] == texts["torch"]
    before = compilations()
    assert before > 0
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=9, ignore_eos=True)
    llm.generate([[1, 2, 3] * 5, [4] * 19], params, use_tqdm=False)
    assert compilations() == before  # new lengths are nothing new
