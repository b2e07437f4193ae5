"""What a graph may touch, and what an engine takes of the card and gives back."""

from __future__ import annotations

import gc

import pytest
import torch
from gpu_tools import DEVICE, MAX_LEN, ON_GPU, allocated, engine, greedy, ids, prompts, run

from minivllm import LLM
from tiny_models import assert_greedy

pytestmark = pytest.mark.gpu
needs_card = pytest.mark.usefixtures("graphs")

SLACK = 2**20  # of a few small tensors that a library may keep


@needs_card
@pytest.mark.parametrize("blocks", [10**9, 10**21])
def test_a_pool_beyond_the_card_is_one_clear_error(blocks: int, tiny_model) -> None:
    with pytest.raises(ValueError, match=rf"num_kvcache_blocks={blocks} takes .* GiB .* are free"):
        engine(tiny_model("qwen3"), num_kvcache_blocks=blocks)


@needs_card
def test_capturing_stores_nothing(tiny_model) -> None:
    """All rows of a capture are pads, and the call before it really runs."""
    llm = engine(tiny_model("qwen3"), max_num_seqs=12)
    runner = llm.engine.runner
    assert not runner.kv_cache.any()
    assert not runner.state.block_table.any() and not runner.state.last_token[:-1].any()
    assert [graph for graph in runner.graphs.decode.buckets if graph > 12] == []
    assert runner.graphs.seconds > 0


@pytest.mark.parametrize("eager", [False, True])
def test_pad_rows_write_nothing_and_nobody_reads_what_is_not_theirs(
    eager: bool, tiny_model, reference
) -> None:
    """A cache full of NaN: afterwards exactly the slots of the texts' tokens are numbers.

    Eleven rows run in a graph of twelve, then fewer and fewer: every padding has its turn.
    """
    if not (eager or ON_GPU):
        pytest.skip("needs a CUDA device: a CPU captures no graphs")
    path = tiny_model("qwen3")
    llm = engine(path, max_num_seqs=12, enforce_eager=eager, enable_prefix_caching=False)
    runner = llm.engine.runner
    runner.kv_cache.fill_(float("nan"))
    batch = prompts(tuple(1 + 3 * i for i in range(11)))
    params = [greedy(2 + i) for i in range(11)]
    texts = ids(run(llm, batch, params))
    assert_greedy(reference(path), batch, texts)
    stored = ~runner.kv_cache.isnan()  # [L, 2, N, S, Hkv, D]
    slots = stored.flatten(2, 3)
    assert (slots == slots[:1, :1, :, :1, :1]).all()  # the same slots in every layer, whole
    # All requests run at once and none comes later, so no block is used twice.
    count = sum(len(prompt) + len(text) - 1 for prompt, text in zip(batch, texts, strict=True))
    assert int(slots[0, 0, :, 0, 0].sum()) == count


def test_a_graph_is_not_disturbed_by_what_happens_between_replays(tiny_model, reference) -> None:
    """Memory that the graphs use must not be handed out: it is filled with NaN if it is."""
    path = tiny_model("qwen3")
    llm = engine(path)
    for prompt in prompts():
        llm.add_request(prompt, greedy())
    texts: dict[str, list[int]] = {}
    while llm.has_unfinished():
        poison = [torch.full((n,), float("nan"), device=DEVICE) for n in (100, 5000, 300_000)]
        del poison
        for output in llm.step():
            texts[output.request_id] = output.outputs[0].token_ids
    in_order = [texts[str(i)] for i in range(len(texts))]
    assert_greedy(reference(path), prompts(), in_order)


@needs_card
def test_memory_comes_back(tiny_model) -> None:
    path = tiny_model("qwen3")

    def once() -> int:
        llm = engine(path, num_kvcache_blocks=4096)  # a pool of 32 MiB
        run(llm, prompts())
        held = torch.cuda.memory_allocated()
        del llm
        return held

    once()  # what libraries keep from their first use on
    before, reserved = allocated(), torch.cuda.memory_reserved()
    held = once()
    assert held > before + 32 * 2**20
    assert allocated() <= before + SLACK
    assert torch.cuda.memory_reserved() <= reserved + 32 * 2**20  # the graphs' pool is gone too


@needs_card
def test_default_pool_is_what_is_useful(tiny_model, reference) -> None:
    """A small model on a large card: seats x longest sequence, measured around a real step."""
    path = tiny_model("qwen3")
    llm = LLM(str(path), device=DEVICE, dtype="float32", max_model_len=MAX_LEN, max_num_seqs=4)
    assert llm.stats.num_blocks == 4 * -(-MAX_LEN // 16)
    assert_greedy(reference(path), prompts(), ids(run(llm, prompts())))


@needs_card
def test_nothing_fits(tiny_model) -> None:
    """One message with the numbers; and what was allocated on the way comes back."""
    path = tiny_model("qwen3")
    before = allocated()
    with pytest.raises(ValueError, match="no GPU memory is left for the KV cache") as caught:
        LLM(str(path), device=DEVICE, max_model_len=MAX_LEN, gpu_memory_utilization=1e-5)
    for word in ("gpu_memory_utilization=1e-05", "GiB", "weights", "graphs", "other processes"):
        assert word in str(caught.value), word
    del caught
    gc.collect()
    assert allocated() <= before + SLACK
    run(engine(path), prompts())  # and the card is as usable as before
