"""Which token comes next, seen from outside: K09 K28 K36 K45 K56 K58 K67."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casebook_tools import SP, G, ids, make_llm, record_logits, run
from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.engine.step_plan import RowSampling
from minivllm.ops.sampling import SamplingBatch, sample
from tiny_models import assert_greedy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
P, Q, R = [11, 12, 13, 14, 15], [1], [200, 3, 17, 250, 6, 9, 99, 120, 33]

# Everything that may differ between two runs of one request without changing its tokens.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_kvcache_blocks": 7},
    {"max_num_batched_tokens": 2, "max_num_seqs": 2},
    {"max_num_batched_tokens": 3, "num_kvcache_blocks": 8},
    {"enable_prefix_caching": False},
    {"enable_chunked_prefill": False, "num_kvcache_blocks": 7, "max_model_len": 64},
    {"kvcache_block_size": 1, "num_kvcache_blocks": 30},
    {"max_num_seqs": 1},
]


@DEPTHS
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_k09_a_seeded_request_is_alone_in_the_world(
    tiny_model: Callable[..., Path], options: dict[str, Any], depth: int
) -> None:
    path = tiny_model()
    truth = make_llm(path)
    llm = make_llm(path, depth=depth, **options)
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 20},
        {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    ]
    for position, fields in enumerate(kinds):
        mine = SP(seed=42, **fields)
        alone = ids(run(truth, [P], mine))[0]
        others = [
            SP(max_tokens=5),
            SP(seed=7, max_tokens=16),
            G(15),
            SP(seed=42, n=2, max_tokens=5),
        ]
        prompts, params = [Q, R, P[:3], R + Q], list(others)
        prompts.insert(position * 2, P)
        params.insert(position * 2, mine)
        assert ids(run(llm, prompts, params))[position * 2] == alone
        assert ids(run(llm, [P], SP(seed=43, **fields)))[0] != alone
    if options.get("num_kvcache_blocks", 64) < 9:
        assert llm.stats.preemptions > 0


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_k09_samples_of_one_request_differ_and_repeat(
    tiny_model: Callable[..., Path], options: dict[str, Any]
) -> None:
    path = tiny_model()
    truth = [s.token_ids for s in run(make_llm(path), [P], SP(seed=5, n=4))[0].outputs]
    assert len({tuple(tokens) for tokens in truth}) == 4
    # The first sample is what n=1 gives.
    assert ids(run(make_llm(path), [P], SP(seed=5)))[0] == truth[0]
    output = run(make_llm(path, **options), [Q, P, R], [SP(n=2), SP(seed=5, n=4), G(9)])[1]
    assert [sample.token_ids for sample in output.outputs] == truth
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]


def test_k09_unseeded_requests_differ(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model())
    long = SP(max_tokens=20)
    texts = [ids(run(llm, [P], long))[0] for _ in range(2)]
    texts += ids(run(llm, [P, P], long))
    texts += [s.token_ids for s in run(llm, [P], SP(max_tokens=20, n=2))[0].outputs]
    assert len({tuple(text) for text in texts}) == len(texts)
    # The engine's own seed makes a whole session repeatable.
    first, again, other = (
        ids(run(make_llm(tiny_model(), seed=seed), [P, Q], long)) for seed in (3, 3, 4)
    )
    assert first == again != other


def test_k09_global_generators_are_not_touched(tiny_model: Callable[..., Path]) -> None:
    import numpy as np

    state, plain = torch.random.get_rng_state(), random.getstate()
    numbers = np.random.get_state()[1].copy()  # type: ignore[union-attr, index]
    llm = make_llm(tiny_model(), seed=9)
    run(llm, [P, Q], [SP(seed=1), SP()])
    assert torch.equal(state, torch.random.get_rng_state())
    assert plain == random.getstate()
    assert (numbers == np.random.get_state()[1]).all()  # type: ignore[union-attr, index]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63)])
def test_k09_every_seed_works(tiny_model: Callable[..., Path], seed: int) -> None:
    llm = make_llm(tiny_model())
    one, two = (ids(run(llm, [P], SP(seed=seed)))[0] for _ in range(2))
    assert one == two
    assert ids(run(llm, [P], SP(seed=12345)))[0] != one


# -- K28 ------------------------------------------------------------------------------------------


def check_logprobs(output: RequestOutput, reference: Any, count: int) -> None:
    """Every entry against transformers' log-softmax of the raw logits."""
    for sample_output in output.outputs:
        tokens = sample_output.token_ids
        assert sample_output.logprobs is not None
        assert len(sample_output.logprobs) == len(tokens)
        start = len(output.prompt_token_ids)
        logits = reference.logits([*output.prompt_token_ids, *tokens])[start - 1 : -1]
        truth = logits.log_softmax(-1)
        total = 0.0
        for token, entry, row in zip(tokens, sample_output.logprobs, truth):
            check_entry(entry, token, row, count)
            total += entry[token].logprob
        assert sample_output.cumulative_logprob == pytest.approx(total, abs=1e-4)


def check_entry(entry: dict[int, Any], token: int, row: torch.Tensor, count: int) -> None:
    assert token in entry and count <= len(entry) <= count + 1
    for other, item in entry.items():
        assert item.logprob == pytest.approx(float(row[other]), abs=1e-4)
        better = int((row > row[other] + 1e-4).sum())
        no_worse = int((row > row[other] - 1e-4).sum())
        assert better + 1 <= item.rank <= max(no_worse, 1)
    ranks = sorted(item.rank for other, item in entry.items() if other != token)
    expected = [r for r in range(1, count + 1) if r != entry[token].rank]
    assert ranks == expected


@DEPTHS
@pytest.mark.parametrize("budget", [2, 3, 64])
@pytest.mark.parametrize("blocks", [64, 9])
def test_k28_logprobs_belong_to_their_tokens(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    budget: int,
    blocks: int,
    depth: int,
) -> None:
    path = tiny_model()
    llm = make_llm(
        path, max_num_batched_tokens=budget, num_kvcache_blocks=blocks, depth=depth, max_num_seqs=4
    )
    prompts = [P, R, Q, P]
    params = [
        G(9, logprobs=5),
        SP(temperature=0.7, seed=3, logprobs=3, top_k=40),
        SP(temperature=2.0, seed=4, logprobs=0, n=2),
        G(9),
    ]
    for _ in range(2):  # the second time with prefix hits
        outputs = run(llm, prompts, params)
        for output, count in zip(outputs[:3], (5, 3, 0)):
            check_logprobs(output, reference(path), count)
        assert outputs[3].outputs[0].logprobs is None
        assert outputs[3].outputs[0].cumulative_logprob is None
    if blocks == 9 and budget > 2:
        assert llm.stats.preemptions > 0


@DEPTHS
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
def test_k28_prompt_logprobs(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], budget: int, depth: int
) -> None:
    path = tiny_model()
    llm = make_llm(path, max_num_batched_tokens=budget, depth=depth)
    prompts = [R + P, Q, R + P]
    for _ in range(2):
        outputs = run(llm, prompts, [G(3, prompt_logprobs=2), G(3, prompt_logprobs=0), G(3, n=2)])
        for output, count in zip(outputs, (2, 0)):
            entries = output.prompt_logprobs
            assert entries is not None and len(entries) == len(output.prompt_token_ids)
            assert entries[0] is None
            rows = reference(path).logits(output.prompt_token_ids).log_softmax(-1)
            for token, entry, row in zip(output.prompt_token_ids[1:], entries[1:], rows):
                assert entry is not None
                check_entry(entry, token, row, count)
            assert output.num_cached_tokens == 0  # every position must be computed
        assert outputs[2].prompt_logprobs is None
        assert_greedy(reference(path), prompts, ids(outputs))


def test_k28_prompt_logprobs_survive_preemption(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    path = tiny_model()
    llm = make_llm(path, num_kvcache_blocks=8, max_num_batched_tokens=6, max_num_seqs=3)
    prompts = [R, R[::-1], R[2:]]
    outputs = run(llm, prompts, G(16, prompt_logprobs=1, logprobs=1))
    assert llm.stats.preemptions > 0
    for output in outputs:
        check_logprobs(output, reference(path), 1)
        rows = reference(path).logits(output.prompt_token_ids).log_softmax(-1)
        assert output.prompt_logprobs is not None
        for token, entry, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], rows):
            assert entry is not None
            check_entry(entry, token, row, 1)


def test_k28_streamed_pieces_carry_their_logprobs(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model(), max_num_batched_tokens=3)
    whole = run(llm, [R], SP(seed=1, logprobs=2))[0].outputs[0]
    pieces = [output.outputs[0] for output in llm.stream([R], SP(seed=1, logprobs=2))]
    assert all(len(piece.logprobs or []) == len(piece.token_ids) for piece in pieces)
    assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
    entries = [entry for piece in pieces for entry in piece.logprobs or []]
    for mine, theirs in zip(entries, whole.logprobs or [], strict=True):
        assert list(mine) == list(theirs)
        for token in mine:
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_k28_as_many_logprobs_as_there_are_tokens(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    llm = make_llm(tiny_model())
    output = run(llm, [P], G(2, logprobs=320))[0]
    check_logprobs(output, reference(tiny_model()), 320)
    for field in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError, match=f"{field}=321.*320"):
            llm.generate([P], G(2, **{field: 321}))


# -- K36 ------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_k36_only_the_last_chunk_yields_a_token(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    budget: int,
    depth: int,
) -> None:
    made = tiny_model()
    prompt = R + P + R[::-1]
    # Every inner position would "end" the text if its argmax were taken for a token.
    inner = {int(row.argmax()) for row in reference(made).logits(prompt)[:-1]}
    tokens = reference(made).greedy(prompt, 12)
    eos = sorted(inner - set(tokens[:12]))
    assert len(eos) > 5
    path = copy_model(made, eos_token_id=eos)
    llm = make_llm(path, max_num_batched_tokens=budget, depth=depth)
    output = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (tokens, "length")
    # Tokens appear one a step, none before the prompt is computed.
    llm.reset_prefix_cache()
    before = len(llm.stats.steps)
    pieces = []
    for piece in llm.stream([prompt], SamplingParams(temperature=0, max_tokens=12)):
        assert len(llm.stats.steps) - before >= -(-len(prompt) // budget)
        pieces.append(piece.outputs[0].token_ids)
    assert [len(piece) for piece in pieces] == [1] * 12
    assert [token for piece in pieces for token in piece] == tokens


@DEPTHS
def test_k36_randomness_does_not_depend_on_the_chunks(
    tiny_model: Callable[..., Path], depth: int
) -> None:
    texts = []
    for budget in (1, 2, 3, 5, 64):
        llm = make_llm(tiny_model(), max_num_batched_tokens=budget, depth=depth)
        output = run(llm, [R + P, Q], [SP(seed=8, temperature=1), SP(seed=9, n=2)])
        texts.append([sample.token_ids for o in output for sample in o.outputs])
        seen: dict[tuple[str, int], list[int]] = {}
        for o in llm.stream([R + P, Q], [SP(seed=8, temperature=1), SP(seed=9, n=2)]):
            for s in o.outputs:
                seen.setdefault((o.request_id, s.index), []).extend(s.token_ids)
        assert sorted(seen.values()) == sorted(texts[-1])
    assert all(text == texts[0] for text in texts)


# -- K45 ------------------------------------------------------------------------------------------


@DEPTHS
def test_k45_greedy_is_exact_in_a_mixed_batch(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    llm = make_llm(tiny_model(), depth=depth)
    greedy = G(10)
    outputs = ids(run(llm, [[1, 2]] * 3, [greedy, SP(seed=1, max_tokens=10), greedy]))
    expected = reference(tiny_model()).greedy([1, 2], 10)
    assert outputs[0] == outputs[2] == expected != outputs[1]
    # Greedy neighbours use up none of a sampling request's randomness.
    assert ids(run(llm, [[1, 2]], SP(seed=1, max_tokens=10)))[0] == outputs[1]
    assert (
        ids(run(llm, [[1, 2]], SP(temperature=0.0, seed=77, top_k=3, max_tokens=10)))[0] == expected
    )
    assert [s.token_ids for s in run(llm, [[1, 2]], G(10, n=3))[0].outputs] == [expected] * 3


def row(**fields: Any) -> RowSampling:
    defaults = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "sample_index": 0,
        "position": 0,
    }  # fmt: skip
    return RowSampling(**{**defaults, **fields})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_k45_ties_and_rows_of_minus_infinity(dtype: torch.dtype) -> None:
    tie = torch.zeros(1, 50, dtype=dtype)
    tie[0, [7, 30, 49]] = 3.0
    only = torch.full((1, 50), float("-inf"), dtype=dtype)
    only[0, 41] = -1e4
    logits = torch.cat([tie, only])
    for mates in ([], [row(seed=5)], [row(seed=5, top_p=0.5, top_k=4)]):
        rows = [row(temperature=0.0), row(temperature=0.0), *mates]
        x = torch.cat([logits, torch.randn(len(mates), 50).to(dtype)])
        assert sample(x, SamplingBatch.from_rows(rows)).tolist()[:2] == [7, 41]
    for fields in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 50.0}):
        assert sample(only, SamplingBatch.from_rows([row(**fields)])).tolist() == [41]


# -- K56 K58 K67: filters and temperatures at the edge, in the engine -----------------------------


@DEPTHS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_k56_top_p_to_zero_is_greedy(
    tiny_model: Callable[..., Path], dtype: str, depth: int
) -> None:
    llm = make_llm(tiny_model(), dtype=dtype, depth=depth)
    greedy = ids(run(llm, [P, R], G(12)))
    for top_p in (1e-3, 1e-7, 1e-9, 1e-30, 5e-324, 0, 0.0):
        assert ids(run(llm, [P, R], SP(top_p=top_p))) == greedy, top_p
        assert ids(run(llm, [P, R], SP(top_p=top_p, top_k=3, min_p=0.5))) == greedy
    assert ids(run(llm, [P, R], SP(min_p=1.0))) == greedy


def test_k56_top_p_of_a_flat_distribution() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        flat = torch.zeros(1, 4096, dtype=dtype)
        for top_p in (1e-3, 1e-7, 1e-9, 1e-30, 0.0):
            chosen = int(sample(flat, SamplingBatch.from_rows([row(top_p=top_p)]))[0])
            assert 0 <= chosen < 4096
            if top_p <= 1 / 4096:
                assert chosen == 0


def test_k56_top_p_one_is_off(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model())
    plain = ids(run(llm, [P, R], SP(seed=6)))
    for fields in ({"top_p": 1.0}, {"top_p": 1}, {"min_p": 0}, {"top_k": -1}, {"top_k": 0}):
        assert ids(run(llm, [P, R], SP(seed=6, **fields))) == plain
    for top_p in (-0.1, 1.1, float("nan"), float("inf"), "0.5", None, True):
        with pytest.raises(ValueError, match="top_p"):
            SP(top_p=top_p)


def test_k58_top_k_at_and_beyond_the_vocabulary(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    llm = make_llm(tiny_model())
    plain = ids(run(llm, [P, R], SP(seed=6)))
    for top_k in (320, 321, 10**6, 2**31 - 1, 2**31, 2**63, 10**30, 0, -1):
        assert ids(run(llm, [P, R], SP(seed=6, top_k=top_k))) == plain, top_k
    nearly = ids(run(llm, [P, R], SP(seed=6, top_k=319)))
    assert all(0 <= token < 320 for text in nearly for token in text)
    expected = reference(tiny_model()).greedy(P, 12)
    assert ids(run(llm, [P], SP(top_k=1, temperature=5)))[0] == expected
    for top_k in (-2, 1.5, 2.0, "3", None, True, float("nan")):
        with pytest.raises(ValueError, match="top_k"):
            SP(top_k=top_k)


def test_k58_every_row_keeps_its_own_k(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    llm = make_llm(tiny_model())
    params = [SP(top_k=k, seed=4, temperature=2) for k in (1, 325, 0, 3, 319)]
    alone = [ids(run(llm, [P], one))[0] for one in params]
    assert ids(run(llm, [P] * 5, params)) == alone
    assert ids(run(llm, [P] * 5, params[::-1])) == alone[::-1]
    assert alone[0] == reference(tiny_model()).greedy(P, 12)
    assert alone[1] == alone[2]
    # k = 3: every token is one of the three best of its position.
    logits = reference(tiny_model()).logits([*P, *alone[3]])[len(P) - 1 : -1]
    for token, scores in zip(alone[3], logits):
        assert int((scores > scores[token] + 1e-4).sum()) < 3


@DEPTHS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_k67_tiny_temperatures_are_greedy(
    tiny_model: Callable[..., Path],
    copy_model: Callable[..., Path],
    scale: float,
    dtype: str,
    depth: int,
) -> None:
    from safetensors.torch import load_file, save_file

    path = copy_model(tiny_model(tie_word_embeddings=False))
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= scale
    save_file(tensors, file, metadata={"format": "pt"})
    llm = make_llm(path, dtype=dtype, depth=depth)
    seen = record_logits(llm)
    greedy = ids(run(llm, [P, R], G(8)))
    largest = max(float(logits.float().abs().max()) for logits in seen)
    assert scale == 1 or 2e3 < largest < 6e4
    # A step between two neighbouring float16 or bfloat16 logits is far above 1e-4, and float32's
    # decision margins on this model are too.
    for temperature in (1e-4, 1e-5, 1e-6, 1e-9, 1e-30, 5e-324):
        texts = ids(run(llm, [P, R], SP(temperature=temperature, max_tokens=8)))
        assert texts == greedy, temperature
    for temperature in (1e-2, 0.5, 1e5, 1e30, 1e308):
        texts = ids(run(llm, [P, R], SP(temperature=temperature, max_tokens=8, top_p=0.9)))
        texts += ids(run(llm, [P, R], SP(temperature=temperature, max_tokens=8)))
        assert all(0 <= token < 320 for text in texts for token in text)


def test_k67_temperatures_that_are_none() -> None:
    for temperature in (-1, -1e-9, float("nan"), float("inf"), float("-inf"), None, "1", True):
        with pytest.raises(ValueError, match="temperature"):
            SP(temperature=temperature)


def test_k67_extreme_logits_stay_in_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, top in ((torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float16, 6e4)):
        logits = (torch.randn(4, 320, generator=generator) * 1e4).clamp(-6e4, 6e4).to(dtype)
        logits[1] = -top
        logits[2, :] = float("-inf")
        logits[2, 17] = top
        logits[3, 5] = top
        logits[3, 6] = -top
        for temperature in (1e-30, 1e-4, 1.0, 1e30):
            for fields in ({}, {"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.2}):
                rows = [row(temperature=temperature, seed=i, **fields) for i in range(4)]
                chosen = sample(logits, SamplingBatch.from_rows(rows)).tolist()
                assert all(0 <= token < 320 for token in chosen)
                assert chosen[2] == 17
                if temperature <= 1:
                    assert chosen[3] == 5


def test_k67_default_parameters_of_a_checkpoint_are_checked(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    path = copy_model(tiny_model())
    (path / "generation_config.json").write_text('{"temperature": -1}')
    llm: LLM = make_llm(path)
    with pytest.raises(ValueError, match="temperature"):
        llm.generate([P])
    (path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert len(ids(run(llm, [P], None))[0]) == 16
