"""Greedy text and logits equal transformers', whatever the engine does to get there.

The reference recomputes everything for every token, in float32, without a cache. Each variant
changes how the engine works (blocks, chunks, hits, preemption, overlap, backend) and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from async_runner import AsyncRunner, ModelDevice

from minivllm import LLM, SamplingParams
from minivllm.ops.sampling import sample
from tiny_models import FAMILIES, VOCAB_SIZE, Reference, assert_greedy

BLOCK_SIZES = (1, 3, 4, 16, 256)
TOLERANCE = 1e-4
COUNT = 20
LENGTHS = (1, 2, 3, 5, 9, 16, 17, 31, 48)
MAX_LEN = 96
Checkpoint = tuple[Path, Reference]


Make = Callable[..., Path]
Refer = Callable[[Path], Reference]


def family_options(name: str) -> dict[str, Any]:
    """What else differs between models: tied and untied heads, groups of 1, 2 and 3."""
    if name == "llama":
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
        return {"tie_word_embeddings": False, **heads}
    if name == "mistral":
        return {"tie_word_embeddings": False, "num_key_value_heads": 4, "sliding_window": MAX_LEN}
    return {}


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tiny_model: Make, reference: Refer) -> Checkpoint:
    """Each family."""
    path = tiny_model(request.param, **family_options(request.param))
    return path, reference(path)


@pytest.fixture(params=sorted(FAMILIES))
def smooth_family(request: pytest.FixtureRequest, tiny_model: Make, reference: Refer) -> Checkpoint:
    """Smaller weights, for comparing logits.

    With those of `family` scores are so steep that the reference itself is 2e-4 away from its
    float64 form; here rounding stays below 1e-5, and a difference of 1e-4 is a fault.
    """
    path = tiny_model(request.param, initializer_range=0.2, **family_options(request.param))
    return path, reference(path)


@pytest.fixture
def qwen3(tiny_model: Make, reference: Refer) -> Checkpoint:
    """One family for the variants that do not depend on it."""
    path = tiny_model("qwen3")
    return path, reference(path)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Seeded prompts over the whole vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def greedy(count: int = COUNT, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **fields)


def engine(path: Path, depth: int = 0, late: bool | None = None, **options: Any) -> LLM:
    """An LLM at a depth; `late` puts the asynchronous runner in front of the real one."""
    llm = LLM(str(path), max_model_len=MAX_LEN, **options)
    llm.engine.depth = depth
    if late is not None:
        device = ModelDevice(llm.engine.runner)
        runner = AsyncRunner(device, llm.config.kvcache_block_size, late=late)
        runner.scheduler = llm.engine.scheduler
        llm.engine.runner = runner
    return llm


def generate(llm: LLM, batch: list[list[int]], count: int = COUNT) -> list[list[int]]:
    """Greedy ids of a batch; the pool is clean afterwards."""
    outputs = llm.generate(batch, greedy(count), use_tqdm=False)
    assert llm.engine.scheduler.block_manager.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


# -- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_mixed_lengths(family: Checkpoint, block_size: int, backend: str) -> None:
    path, reference = family
    llm = engine(path, kvcache_block_size=block_size, attention_backend=backend)
    batch = prompts()
    assert_greedy(reference, batch, generate(llm, batch))
    assert llm.stats.preemptions == 0
    assert {step.phase for step in llm.stats.steps} == {"prefill", "decode"}


@pytest.mark.parametrize("budget", [9, 13, 40])
@pytest.mark.parametrize("block_size", [3, 16])
def test_chunked_prompts(family: Checkpoint, block_size: int, budget: int) -> None:
    """Budgets that cut every long prompt, and steps that mix chunks with decode rows."""
    path, reference = family
    llm = engine(path, kvcache_block_size=block_size, max_num_batched_tokens=budget)
    batch = prompts()
    assert_greedy(reference, batch, generate(llm, batch))
    assert any(step.phase == "mixed" for step in llm.stats.steps)
    assert max(step.num_tokens for step in llm.stats.steps) <= budget


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7])
def test_budgets_that_cut_every_prompt(qwen3: Checkpoint, budget: int) -> None:
    path, reference = qwen3
    llm = engine(path, kvcache_block_size=4, max_num_batched_tokens=budget)
    batch = prompts((2, 9, 17))
    assert_greedy(reference, batch, generate(llm, batch, 8))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefix_hits(family: Checkpoint, block_size: int) -> None:
    """Concurrent duplicates, repeats, shared beginnings with other tails, generated blocks."""
    path, reference = family
    llm = engine(path, kvcache_block_size=block_size, max_num_batched_tokens=32)
    base = prompts((48,))[0]
    batch = [base, base, base[:33], [*base[:32], 7, 8], [*base[:5], 9], base[1:]]
    for _ in range(2):
        assert_greedy(reference, batch, generate(llm, batch, 12))
    outputs = llm.generate(batch, greedy(12), use_tqdm=False)
    cached = [output.num_cached_tokens for output in outputs]
    whole = [(len(prompt) - 1) // block_size * block_size for prompt in batch]
    assert cached == whole  # everything but the last token, in full blocks
    grown = [*base, *reference.greedy(base, 12)]  # a conversation that goes on
    (output,) = llm.generate([grown], greedy(12), use_tqdm=False)
    assert output.num_cached_tokens == (len(grown) - 1) // block_size * block_size
    assert_greedy(reference, [grown], [output.outputs[0].token_ids])


def test_hit_of_all_but_one_token(qwen3: Checkpoint) -> None:
    """The cached part ends where decode would begin: one token is computed, as a prompt's."""
    path, reference = qwen3
    llm = engine(path, kvcache_block_size=4)
    for length in (5, 9, 8, 4):
        (prompt,) = prompts((length,), seed=length)
        for _ in range(2):
            assert_greedy(reference, [prompt], generate(llm, [prompt], 6))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_preemption(family: Checkpoint, block_size: int, caching: bool, depth: int) -> None:
    """A pool for hardly more than one sequence: the others are preempted, and replay."""
    path, reference = family
    batch = prompts((17, 16, 9, 31))
    blocks = -(-(31 + COUNT + 18) // block_size)
    llm = engine(
        path,
        depth,
        late=True if depth else None,
        kvcache_block_size=block_size,
        num_kvcache_blocks=blocks,
        enable_prefix_caching=caching,
        max_num_batched_tokens=24,
    )
    assert_greedy(reference, batch, generate(llm, batch))
    assert llm.stats.preemptions > 0
    assert llm.stats.peak_blocks_in_use <= blocks


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_two_phases(qwen3: Checkpoint, depth: int, caching: bool) -> None:
    """Chunked prefill off: whole prompts first, then decode; preemption included."""
    path, reference = qwen3
    llm = engine(
        path,
        depth,
        kvcache_block_size=4,
        enable_chunked_prefill=False,
        enable_prefix_caching=caching,
        num_kvcache_blocks=24,
    )
    batch = prompts((17, 16, 31, 5, 9))
    assert_greedy(reference, batch, generate(llm, batch))
    assert llm.stats.preemptions > 0
    assert "mixed" not in {step.phase for step in llm.stats.steps}


@pytest.mark.parametrize("late", [None, True, False])
@pytest.mark.parametrize("backend", ["torch", "sdpa"])
def test_depth_1(family: Checkpoint, backend: str, late: bool | None) -> None:
    """The real runner at depth 1: alone, and behind the one that computes as late as it may."""
    path, reference = family
    llm = engine(
        path,
        1,
        late,
        kvcache_block_size=4,
        max_num_batched_tokens=24,
        attention_backend=backend,
        max_num_seqs=4,
    )
    batch = [*prompts(), prompts()[-1]]
    assert_greedy(reference, batch, generate(llm, batch))
    if late is not None:
        assert llm.engine.runner.max_in_flight == 2


def test_more_prompts_than_seats(qwen3: Checkpoint) -> None:
    path, reference = qwen3
    llm = engine(path, max_num_seqs=2, kvcache_block_size=4)
    batch = prompts((3, 9, 1, 17, 5, 2, 8))
    assert_greedy(reference, batch, generate(llm, batch, 8))
    assert max(step.num_rows for step in llm.stats.steps) == 2


# -- random requests ------------------------------------------------------------------------------


def test_seeded_requests_are_alone_in_the_world(qwen3: Checkpoint) -> None:
    """Every mix of sampling numbers, samples and neighbours: the tokens depend on the seed alone.

    Slots of the device tables change hands all the time here, with other numbers in each.
    """
    path, _ = qwen3
    rng = random.Random(7)
    batch = prompts(tuple(rng.randrange(1, 30) for _ in range(12)))
    params = [
        SamplingParams(
            n=rng.choice((1, 1, 3)),
            temperature=rng.choice((0.0, 0.7, 1.0, 2.0)),
            top_k=rng.choice((0, 0, 5, 60)),
            top_p=rng.choice((1.0, 1.0, 0.8)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            seed=rng.randrange(2**63),
            max_tokens=rng.randrange(1, 25),
            ignore_eos=True,
        )
        for _ in batch
    ]

    def run(llm: LLM, chosen: list[int]) -> dict[int, list[list[int]]]:
        outputs = llm.generate(
            [batch[i] for i in chosen], [params[i] for i in chosen], use_tqdm=False
        )
        texts = [[sample.token_ids for sample in output.outputs] for output in outputs]
        return dict(zip(chosen, texts, strict=True))

    everybody = list(range(len(batch)))
    expected: dict[int, list[list[int]]] = {}
    alone = engine(path)
    for i in everybody:
        expected |= run(alone, [i])
    variants: list[dict[str, Any]] = [
        {"kvcache_block_size": 4},
        {"kvcache_block_size": 3, "max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"kvcache_block_size": 4, "num_kvcache_blocks": 16, "max_num_seqs": 5},
        {"kvcache_block_size": 4, "enable_chunked_prefill": False, "max_num_seqs": 2},
    ]
    for options in variants:
        for depth, late in ((0, None), (1, None), (1, True)):
            llm = engine(path, depth, late, **options)
            order = rng.sample(everybody, len(everybody))
            assert run(llm, order) == expected
            assert run(llm, order[:5]) == {i: expected[i] for i in order[:5]}
            if "num_kvcache_blocks" in options:
                assert llm.stats.preemptions > 0


# -- logits ---------------------------------------------------------------------------------------


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[tuple[int, int, torch.Tensor]]]:
    """(seed, position, logits [V]) of every token drawn meanwhile, in whatever order of rows."""
    found: list[tuple[int, int, torch.Tensor]] = []
    part = llm._parts["sample"]

    def recording(logits, batch, vocab_start=0):
        rows = zip(batch.seed.tolist(), batch.position.tolist(), logits, strict=True)
        found.extend((seed, position, line.clone()) for seed, position, line in rows)
        return sample(logits, batch, vocab_start)

    part.target = recording
    yield found
    part.target = sample


def assert_logits(reference: Reference, llm: LLM, batch: list[list[int]], count: int) -> int:
    """Logits of every drawn token equal the reference's on the same text; returns their number."""
    params = [greedy(count, seed=number) for number in range(len(batch))]  # names the rows
    with recorded_logits(llm) as found:
        outputs = llm.generate(batch, params, use_tqdm=False)
    texts = [[*p, *o.outputs[0].token_ids] for p, o in zip(batch, outputs, strict=True)]
    expected = [reference.logits(text[:-1]) for text in texts]
    for seed, position, logits in found:
        want = expected[seed][position - 1]
        torch.testing.assert_close(logits, want, atol=TOLERANCE, rtol=0)
    drawn = {(seed, position) for seed, position, _ in found}
    assert drawn == {
        (seed, len(prompt) + i) for seed, prompt in enumerate(batch) for i in range(count)
    }
    return len(found)


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
def test_logits(smooth_family: Checkpoint, backend: str) -> None:
    """Of prefill, decode, after a hit, in chunks, and after preemption."""
    path, reference = smooth_family
    batch = prompts((1, 7, 12, 33))
    for options in (
        {"kvcache_block_size": 4},
        {"kvcache_block_size": 3, "max_num_batched_tokens": 5},
        {"kvcache_block_size": 4, "num_kvcache_blocks": 15},
    ):
        llm = engine(path, attention_backend=backend, parts={"sample": sample}, **options)
        assert assert_logits(reference, llm, batch, 8) >= 8 * len(batch)
        before = llm.stats.cached_tokens
        assert_logits(reference, llm, batch, 8)
        assert llm.stats.cached_tokens > before
    assert llm.stats.preemptions > 0


def test_decode_equals_prefill_of_the_same_history(smooth_family: Checkpoint) -> None:
    """Case K55: after any number of decode steps, the logits are those of one whole prefill."""
    path, reference = smooth_family
    llm = engine(path, kvcache_block_size=4, parts={"sample": sample}, enable_prefix_caching=False)
    (prompt,) = prompts((3,))
    with recorded_logits(llm) as found:
        (output,) = llm.generate([prompt], greedy(12), use_tqdm=False)
    decoded = {position: logits for _, position, logits in found}
    text = [*prompt, *output.outputs[0].token_ids]
    for length in range(3, 15):
        with recorded_logits(llm) as found:
            llm.generate([text[:length]], greedy(1), use_tqdm=False)
        torch.testing.assert_close(found[0][2], decoded[length], atol=TOLERANCE, rtol=0)


def test_every_prompt_position(smooth_family: Checkpoint) -> None:
    """Prompt log-probabilities read all positions' logits, in chunks and whole."""
    path, reference = smooth_family
    (prompt,) = prompts((33,), seed=5)
    expected = reference.logits(prompt).log_softmax(-1)
    for budget in (4, 64):
        llm = engine(path, kvcache_block_size=4, max_num_batched_tokens=budget)
        params = greedy(2, prompt_logprobs=3)
        for _ in range(2):  # the second time, the cache knows the prompt and must not be asked
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.num_cached_tokens == 0 and output.prompt_logprobs[0] is None
            for at, entry in enumerate(output.prompt_logprobs[1:], 1):
                best = expected[at - 1].topk(3)
                assert {*best.indices.tolist(), prompt[at]} == set(entry)
                for token, found in entry.items():
                    assert abs(found.logprob - float(expected[at - 1][token])) < TOLERANCE
