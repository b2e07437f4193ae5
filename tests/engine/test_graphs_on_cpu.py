"""An engine with captured graphs, the GPU played by the CPU: replays call what was captured again.

All that surrounds the graphs is the real thing: buckets, pads, static inputs, shared outputs, depth
1. What only a card can show is in tests/gpu.
"""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from played_gpu import Pool, Ring

from minivllm import LLM, SamplingParams
from minivllm.engine import decode_graphs, graphs, model_runner, prefill_graphs, step_graphs
from minivllm.ops.pinned import OnItsWay

VOCAB = 301


@pytest.fixture
def build(monkeypatch, tiny_model):
    monkeypatch.setattr(prefill_graphs, "PinnedRing", Ring)
    monkeypatch.setattr(decode_graphs, "PinnedRing", Ring)
    monkeypatch.setattr(step_graphs, "GraphPool", Pool)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10, 10))
    # A copy to the host is one: the next replay overwrites what it was made from.
    copied = lambda tensor: OnItsWay(tensor.clone(), None)  # noqa: E731
    monkeypatch.setattr(model_runner, "start_copy_to_host", copied)
    path = tiny_model("qwen3", vocab_size=VOCAB)

    def make(captured: bool, **options) -> LLM:
        llm = LLM(str(path), device="cpu", attention_backend="torch", **options)
        if captured:
            llm.engine.runner.capture_graphs(options.get("max_num_batched_tokens", 64))
            llm.engine.depth = 1
        return llm

    return make


def requests(rng, max_len, capacity):
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    prompts, params = [], []
    for _ in range(rng.randrange(3, 10)):
        prompt = shared[: rng.randrange(20)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_len - 8))]
        prompts.append(prompt[: min(max_len - 4, capacity - 1)])
        params.append(
            SamplingParams(
                temperature=rng.choice([0, 0, 0.8]),
                top_p=rng.choice([1, 0.9]),
                seed=rng.randrange(99),
                n=rng.choice([1, 1, 3]),
                max_tokens=rng.randrange(1, 12),
                logprobs=rng.choice([None, 2]),
                prompt_logprobs=rng.choice([None, None, 1]),
                ignore_eos=True,
            )
        )
    return prompts, params


def told(outputs):
    """Tokens, the ids of all log-probabilities and their values, and why each text ended."""
    found = []
    for output in outputs:
        found.append([list(map(list, filter(None, output.prompt_logprobs or ())))])
        for one in output.outputs:
            places = one.logprobs or ()
            values = [[round(entry.logprob, 3) for entry in place.values()] for place in places]
            found.append((list(one.token_ids), list(map(list, places)), values, one.finish_reason))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_same_as_eager_and_in_step(build, seed):
    rng = random.Random(seed)
    block, max_len = rng.choice([1, 3, 4, 16]), rng.choice([33, 50, 64])
    seats = rng.choice([1, 2, 5, 9])
    options = {
        "max_model_len": max_len,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, rng.choice([seats, seats + 1, 16, 70, 130])),
        "kvcache_block_size": block,
        "num_kvcache_blocks": -(-max_len // block) + rng.randrange(20),
        "enable_prefix_caching": rng.random() < 0.7,
    }
    prompts, params = requests(rng, max_len, options["num_kvcache_blocks"] * block)
    texts = []
    for captured in (False, True):
        llm = build(captured, **options)
        for _ in range(2):  # the second time from the prefix cache
            texts.append(told(llm.generate(prompts, params, use_tqdm=False)))
            assert llm.engine.scheduler.block_manager.num_used == 0
    assert texts[2] == texts[0] and texts[3] == texts[1]


def test_nothing_is_left_of_an_engine_when_it_goes(build, monkeypatch):
    """By reference counts alone: the next engine asks at once how much memory is free."""
    # A real graph holds no function, so neither may what stands for it here.
    monkeypatch.setattr(Pool, "capture", lambda self, function: (object(), function()))
    llm = build(False, max_model_len=64, max_num_seqs=2, num_kvcache_blocks=8)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    llm.engine.runner.capture_graphs(64)
    alive = [weakref.ref(llm.engine.runner), weakref.ref(llm.engine.runner.kv_cache)]
    gc.collect()
    gc.disable()
    try:
        del llm
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_all_captures_share_one_memory_and_one_stream(monkeypatch):
    """Memory is kept by stream: another one would find nothing to use again."""
    calls = []
    made = iter(range(9))

    def graph(cuda_graph, pool, stream, capture_error_mode):
        calls.append((pool, stream))
        return nullcontext()

    fake = {"Stream": object, "CUDAGraph": lambda: SimpleNamespace(pool=lambda: next(made))}
    for name, value in {**fake, "graph": graph, "synchronize": lambda: None}.items():
        monkeypatch.setattr(graphs.torch.cuda, name, value)
    runs = []
    pool = graphs.GraphPool()
    outputs = [pool.capture(lambda: runs.append(0) or len(runs))[1] for _ in range(3)]
    assert outputs == [2, 4, 6]  # once before each capture
    assert [memory for memory, _ in calls] == [None, 0, 0]
    assert len({stream for _, stream in calls}) == 1
