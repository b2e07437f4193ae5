"""Reading a step late changes nothing: ends, log-probabilities, aborts, seeds, neighbours."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_tools import COUNT, DEVICE, engine, greedy, ids, on_cpu, prompts, run

from minivllm import LLM, RequestOutput, SamplingParams
from tiny_models import assert_greedy

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3  # of a log-probability, between the card and the CPU


def at_both_depths(
    llm: LLM, batch: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """The outputs at depth 1, which must be those at depth 0."""
    llm.engine.depth = 0
    expected = run(llm, batch, params)
    llm.reset_prefix_cache()
    llm.engine.depth = 1
    found = run(llm, batch, params)
    for a, b in zip(expected, found, strict=True):
        (x,), (y,) = a.outputs, b.outputs
        assert (x.token_ids, x.text) == (y.token_ids, y.text)
        assert (x.finish_reason, x.stop_reason) == (y.finish_reason, y.stop_reason)
    return found


def test_end_tokens(tiny_model, copy_model, reference) -> None:
    """EOS out of the config and a stop token of the request's own, in the middle of a text."""
    path = tiny_model("qwen3")
    batch = prompts()
    texts = [reference(path).greedy(prompt, COUNT) for prompt in batch]
    eos, own = texts[0][7], texts[4][5]
    llm = engine(copy_model(path, eos_token_id=eos))
    params = greedy(ignore_eos=False, stop_token_ids=[own])
    outputs = at_both_depths(llm, batch, params)
    for output, text in zip(outputs, texts, strict=True):
        ends = [i for i, token in enumerate(text) if token in (eos, own)]
        count = ends[0] + 1 if ends else COUNT
        assert output.outputs[0].token_ids == text[:count]
        assert output.outputs[0].finish_reason == ("stop" if ends else "length")
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}


def test_stop_strings(tiny_model, reference) -> None:
    path = tiny_model("qwen3")
    batch = prompts()
    llm = engine(path)
    text = run(llm, batch)[3].outputs[0].text
    assert len(text) > 6
    stop = text[4:6]
    outputs = at_both_depths(llm, batch, greedy(stop=[stop]))
    assert outputs[3].outputs[0].stop_reason == stop
    assert outputs[3].outputs[0].text == text[: text.index(stop)]
    assert all(stop not in output.outputs[0].text for output in outputs)


def test_logprobs_are_those_of_their_own_step(tiny_model) -> None:
    """The graphs share one buffer of logits: it must be read before the next replay fills it."""
    path = tiny_model("qwen3", initializer_range=0.2)
    batch = prompts()
    params = greedy(logprobs=3, prompt_logprobs=2)
    found = at_both_depths(engine(path), batch, params)
    expected = run(on_cpu(path), batch, params)
    for a, b in zip(found, expected, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert len(a.prompt_logprobs) == len(b.prompt_logprobs) == len(a.prompt_token_ids)
        pairs = [*zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True)]
        pairs += zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True)
        for x, y in pairs:
            assert set(x) == set(y)
            for token in x:
                assert x[token].rank == y[token].rank
                assert abs(x[token].logprob - y[token].logprob) < TOLERANCE


def test_abort_with_steps_in_flight(tiny_model, reference) -> None:
    """A newcomer takes the seat and the blocks of an aborted request, and reads none of it."""
    path = tiny_model("qwen3")
    batch = prompts((17, 31, 9, 16, 5, 3))
    for depth in (0, 1):
        llm = engine(path, depth=depth, max_num_seqs=4, num_kvcache_blocks=16)
        texts: dict[str, list[int]] = {}
        names = [llm.add_request(prompt, greedy()) for prompt in batch[:4]]
        for step in range(200):
            if step == 5:
                assert llm.abort(names[1]) is not None
                names += [llm.add_request(prompt, greedy()) for prompt in batch[4:]]
            if not llm.has_unfinished():
                break
            for output in llm.step():
                texts[output.request_id] = output.outputs[0].token_ids
        assert llm.engine.scheduler.block_manager.num_used == 0
        kept = [i for i in range(len(batch)) if i != 1]
        assert_greedy(reference(path), [batch[i] for i in kept], [texts[names[i]] for i in kept])


def test_seeded_sampling_equals_the_cpus(tiny_model) -> None:
    """One captured graph serves every mix of requests, and slots change hands all the time."""
    path = tiny_model("qwen3", initializer_range=0.2)
    rng = random.Random(7)
    batch = prompts(tuple(rng.randrange(1, 40) for _ in range(20)), seed=3)
    params = [
        SamplingParams(
            n=rng.choice((1, 1, 2)),
            temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
            top_k=rng.choice((0, 0, 5, 60)),
            top_p=rng.choice((1.0, 1.0, 0.8)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            seed=rng.randrange(2**63),
            max_tokens=rng.randrange(2, 25),
            ignore_eos=True,
        )
        for _ in batch
    ]

    def texts(llm: LLM) -> list[list[list[int]]]:
        return [[x.token_ids for x in output.outputs] for output in run(llm, batch, params)]

    expected = texts(on_cpu(path))
    assert texts(engine(path)) == expected
    assert texts(engine(path, enforce_eager=True, depth=0)) == expected
    small = engine(path, num_kvcache_blocks=7, max_num_seqs=5)
    assert texts(small) == expected
    assert small.stats.preemptions > 0


def test_one_engine_starts_while_another_generates(tiny_model, reference) -> None:
    """A second engine, in a second thread: its captures must bear the first one's launches."""
    path = tiny_model("qwen3")
    batch = prompts()
    first = engine(path)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(engine, tiny_model("llama"))
        texts = [ids(run(first, batch))]
        while not started.done():
            texts.append(ids(run(first, batch)))
        second = started.result()
    for found in texts:
        assert_greedy(reference(path), batch, found)
    assert_greedy(reference(tiny_model("llama")), batch, ids(run(second, batch)))


@pytest.mark.parametrize("cards", [(DEVICE, DEVICE), ("cuda:0", "cuda:1")], ids=["one", "two"])
def test_two_engines_in_one_process(cards: tuple[str, str], tiny_model, reference) -> None:
    """Step by step in turn: pools, graphs, counters of split sums and slots are each one's own."""
    if cards[0] != cards[1] and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    paths = [tiny_model("qwen3"), tiny_model("llama")]
    engines = [engine(path, device=card, num_kvcache_blocks=64) for path, card in zip(paths, cards)]
    batch = prompts()
    texts: list[dict[str, list[int]]] = [{}, {}]
    for llm in engines:
        for prompt in batch:
            llm.add_request(prompt, greedy())
    while any(llm.has_unfinished() for llm in engines):
        for llm, found in zip(engines, texts, strict=True):
            for output in llm.step() if llm.has_unfinished() else ():
                found[output.request_id] = output.outputs[0].token_ids
    for path, found in zip(paths, texts, strict=True):
        in_order = [found[str(index)] for index in range(len(batch))]
        assert_greedy(reference(path), batch, in_order)
    assert ids(run(engines[0], batch)) == [texts[0][str(i)] for i in range(len(batch))]
