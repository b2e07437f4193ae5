"""The public calls: order, defaults, chat, streams, the lower level, threads, stats, parts."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import random
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import minivllm
import minivllm.ops.rope
from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.engine import model_runner
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.ops.attention import attention, paged_decode
from minivllm.ops.norms import rms_norm
from minivllm.outputs import EngineStats
from minivllm.progress import Progress
from tiny_models import VOCAB_SIZE, Reference, assert_greedy

Make = Callable[..., Path]
PROMPTS = [[5, 6, 7], [9], list(range(20, 37)), [1, 2, 3, 4]]


def make(path: Path, **options: Any) -> LLM:
    return LLM(str(path), max_model_len=96, kvcache_block_size=4, **options)


@pytest.fixture
def llm(tiny_model: Make) -> LLM:
    return make(tiny_model("qwen3"))


def greedy(count: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **fields)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_clean(llm: LLM) -> None:
    """Nothing queued, nothing running, no block in use: the next call starts from nothing."""
    scheduler = llm.engine.scheduler
    assert not llm.has_unfinished() and not llm.engine.requests and not llm.engine.in_flight
    assert not scheduler.sequences and not scheduler.waiting and not scheduler.running
    assert scheduler.block_manager.num_used == 0
    scheduler.block_manager.check([])


# -- generate -------------------------------------------------------------------------------------


def test_outputs_in_the_order_of_the_prompts(llm: LLM, reference) -> None:
    """Requests end in another order than they came in; each output is its prompt's."""
    counts = [9, 1, 4, 2]
    outputs = llm.generate(PROMPTS, [greedy(n) for n in counts], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(tokens) for tokens in ids(outputs)] == counts
    assert_greedy(reference(llm._path), PROMPTS, ids(outputs))
    assert all(output.finished and output.outputs[0].finish_reason for output in outputs)
    assert len({output.request_id for output in outputs}) == 4
    assert_clean(llm)


def test_every_form_of_a_prompt(llm: LLM) -> None:
    text = "Hello"
    tokens = llm.get_tokenizer().encode(text)
    forms: list[Any] = [
        text,
        [text],
        tokens,
        [tokens],
        {"prompt": text},
        {"prompt_token_ids": tokens},
        [{"prompt": text, "prompt_token_ids": tokens}],
        tuple(tokens),
    ]
    expected = ids(llm.generate(text, greedy(), use_tqdm=False))
    for form in forms:
        outputs = llm.generate(form, greedy(), use_tqdm=False)
        assert ids(outputs) == expected and outputs[0].prompt_token_ids == tokens
        assert outputs[0].prompt in (text, None)
        assert outputs[0].outputs[0].text == llm.get_tokenizer().decode(expected[0])


def test_samples_in_the_order_of_their_index(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=6, logprobs=1)
    (output,) = llm.generate([PROMPTS[2]], params, use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    for sample in output.outputs:
        assert len(sample.logprobs) == len(sample.token_ids) == 6
        total = sum(e[t].logprob for e, t in zip(sample.logprobs, sample.token_ids))
        assert sample.cumulative_logprob == pytest.approx(total)
    (single,) = llm.generate(
        [PROMPTS[2]], SamplingParams(temperature=1.0, seed=3, max_tokens=6), use_tqdm=False
    )
    assert single.outputs[0].token_ids == output.outputs[0].token_ids


def test_seed_of_the_engine_decides_unseeded_requests(tiny_model: Make) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    texts = []
    for seed in (1, 1, 2):
        llm = make(tiny_model("qwen3"), seed=seed)
        texts.append(ids(llm.generate([[3]] * 2, params, use_tqdm=False)))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_default_parameters_of_the_checkpoint(tiny_model: Make, copy_model: Make) -> None:
    path = copy_model(tiny_model("qwen3"))
    (path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.25, "top_k": 7, "top_p": 0.5, "max_new_tokens": 5})
    )
    llm = make(path)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.25, 7, 0.5, 5)
    assert len(ids(llm.generate([[1]], use_tqdm=False))[0]) == 5
    plain = make(tiny_model("llama")).get_default_sampling_params()
    assert plain == SamplingParams()


def test_progress_bar_on_and_off(llm: LLM) -> None:
    for show in (False, True):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            llm.generate(PROMPTS, greedy(), use_tqdm=show)
        assert out.getvalue() == ""
        if show:
            assert "4/4" in err.getvalue() and "tok/s" in err.getvalue()
        else:
            assert err.getvalue() == ""


def test_one_long_request_is_seen_to_move(capsys) -> None:
    stats = EngineStats()
    with Progress(1, stats, show=True) as progress:
        for _ in range(3):
            time.sleep(0.11)  # the bar's interval is 0.1
            stats.generated_tokens += 111
            progress.step_done()
        shown = capsys.readouterr().err
    assert all(f"?prompt/s, {n} tok, " in shown for n in (111, 222, 333))


def test_stop_strings_and_ids(llm: LLM) -> None:
    (free,) = llm.generate([[40, 41]], greedy(20), use_tqdm=False)
    text, tokens = free.outputs[0].text, free.outputs[0].token_ids
    stop = text[3:5]
    (cut,) = llm.generate([[40, 41]], greedy(20, stop=[stop]), use_tqdm=False)
    sample = cut.outputs[0]
    assert sample.text == text[: text.index(stop)] and sample.stop_reason == stop
    assert sample.finish_reason == "stop" and tokens[: len(sample.token_ids)] == sample.token_ids
    kept = greedy(20, stop=[stop], include_stop_str_in_output=True)
    (whole,) = llm.generate([[40, 41]], kept, use_tqdm=False)
    assert whole.outputs[0].text == text[: text.index(stop) + 2]
    (by_id,) = llm.generate([[40, 41]], greedy(20, stop_token_ids=[tokens[4]]), use_tqdm=False)
    first = tokens.index(tokens[4])
    assert by_id.outputs[0].token_ids == tokens[: first + 1]
    assert by_id.outputs[0].stop_reason == tokens[4]


# -- chat -----------------------------------------------------------------------------------------


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert output.prompt == text
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    (same,) = llm.generate([output.prompt_token_ids], greedy(), use_tqdm=False)
    assert ids([output]) == ids([same])


def test_chat_without_messages_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([], greedy(), use_tqdm=False)


def test_chat_of_several_conversations_and_options(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": c}] for c in ("a", "b", "c")]
    outputs = llm.chat(conversations, [greedy(n) for n in (1, 2, 3)], use_tqdm=False)
    assert [len(tokens) for tokens in ids(outputs)] == [1, 2, 3]
    assert [output.prompt[17] for output in outputs] == ["a", "b", "c"]
    (bare,) = llm.chat(conversations[0], greedy(), False, add_generation_prompt=False)
    assert bare.prompt == "<|im_start|>user\na<|im_end|>\n"
    template = "{{ messages[0]['content'] }}{{ extra }}"
    (own,) = llm.chat(
        conversations[0],
        greedy(),
        use_tqdm=False,
        chat_template=template,
        chat_template_kwargs={"extra": "!"},
    )
    assert own.prompt == "a!"


def test_no_tokenizer(tiny_model: Make, copy_model: Make) -> None:
    """Token ids in and out still work; text is refused, and says why."""
    path = copy_model(tiny_model("qwen3"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    llm = make(path)
    (output,) = llm.generate([[1, 2]], greedy(), use_tqdm=False)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 8
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])
    assert_clean(llm)


# -- stream ---------------------------------------------------------------------------------------


def join(stream, count: int) -> list[list[dict[str, Any]]]:
    """Pieces of a stream put together: by prompt, by sample."""
    joined: dict[str, list[dict[str, Any]]] = {}
    for output in stream:
        samples = joined.setdefault(
            output.request_id,
            [{"text": "", "ids": [], "logprobs": []} for _ in output.outputs],
        )
        for sample, piece in zip(samples, output.outputs, strict=True):
            sample["text"] += piece.text
            sample["ids"] += piece.token_ids
            sample["logprobs"] += piece.logprobs or []
            sample["reason"] = (piece.finish_reason, piece.stop_reason)
    assert len(joined) == count
    return [joined[name] for name in sorted(joined, key=int)]


@pytest.mark.parametrize("seed", range(4))
def test_a_joined_stream_is_generates_output(llm: LLM, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 12))] for _ in range(4)]
    params = [
        SamplingParams(
            n=rng.choice((1, 2)),
            temperature=1.0,
            top_k=60,
            seed=seed,
            max_tokens=rng.randrange(1, 30),
            stop=rng.choice(([], ["e"], ["ab", "!"], ["\n"])),
            logprobs=rng.choice((None, 0, 2)),
        )
        for _ in prompts
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = [
        [
            {
                "text": sample.text,
                "ids": sample.token_ids,
                "logprobs": sample.logprobs or [],
                "reason": (sample.finish_reason, sample.stop_reason),
            }
            for sample in output.outputs
        ]
        for output in outputs
    ]
    found = join(llm.stream(prompts, params), len(prompts))
    pairs = zip(chain(*found), chain(*expected), strict=True)
    for one, other in pairs:
        # Numbers after a cache hit may round differently; everything else is the same.
        values = [
            [entry[token].logprob for entry, token in zip(sample.pop("logprobs"), sample["ids"])]
            for sample in (one, other)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
        assert one == other
    assert_clean(llm)


def test_streamed_text_is_never_taken_back(llm: LLM) -> None:
    """What may become part of a stop string is held back until it is decided."""
    (free,) = llm.generate([[40, 41]], greedy(30), use_tqdm=False)
    text = free.outputs[0].text
    for start in range(0, 12, 3):
        stop = text[start : start + 5]
        params = greedy(30, stop=[stop])
        (whole,) = llm.generate([[40, 41]], params, use_tqdm=False)
        shown = ""
        for output in llm.stream([[40, 41]], params):
            shown += output.outputs[0].text
            assert whole.outputs[0].text.startswith(shown)
        assert shown == whole.outputs[0].text


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_left_stream_leaves_the_engine_empty(llm: LLM, taken: int) -> None:
    for number, _ in enumerate(llm.stream(PROMPTS, greedy(30, ignore_eos=True)), 1):
        if number == taken:
            break
    assert_clean(llm)
    assert len(llm.generate([[1]], greedy(2), use_tqdm=False)) == 1


def test_a_stream_that_is_kept_but_never_started(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, greedy())
    assert_clean(llm)
    llm.generate([[1]], greedy(2), use_tqdm=False)
    stream.close()
    assert_clean(llm)


def test_stream_checks_at_the_call(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1"):
        llm.stream([[1], []], greedy())
    assert_clean(llm)


def test_an_exception_inside_the_loop_of_a_stream(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream(PROMPTS, greedy()):
            raise ZeroDivisionError
    assert_clean(llm)


# -- one call at a time ---------------------------------------------------------------------------


def test_calls_inside_an_open_stream_are_refused(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, greedy(30, ignore_eos=True))
    next(stream)
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([[1]], greedy(), use_tqdm=False),
        lambda: next(llm.stream([[1]], greedy())),
        lambda: llm.chat([{"role": "user", "content": "x"}], greedy(), use_tqdm=False),
        lambda: llm.add_request([1], greedy()),
        llm.step,
        lambda: llm.abort("0"),
        llm.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="while another call of this LLM is running"):
            call()
    rest = list(stream)  # and the stream itself goes on unharmed
    assert sum(output.finished for output in rest) == 4
    assert_clean(llm)


def test_a_second_thread_is_refused(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, greedy(5))
    next(stream)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            llm.generate([[1]], greedy(), use_tqdm=False)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "another thread" in str(caught[0])
    stream.close()
    worker = threading.Thread(target=work)  # alone, another thread is welcome
    worker.start()
    worker.join()
    assert len(caught) == 1
    assert_clean(llm)


def test_generate_between_add_request_and_the_end_is_refused(llm: LLM) -> None:
    llm.add_request([1, 2], greedy())
    with pytest.raises(RuntimeError, match="1 requests of add_request"):
        llm.generate([[1]], greedy(), use_tqdm=False)
    finished = []
    while llm.has_unfinished():
        finished += [output for output in llm.step() if output.finished]
    assert len(finished) == 1
    assert_clean(llm)


# -- request by request ---------------------------------------------------------------------------


def test_add_request_and_step(llm: LLM, reference) -> None:
    names = [llm.add_request(prompt, greedy()) for prompt in PROMPTS[:2]]
    texts: dict[str, list[int]] = {}
    done = []
    for turn in range(100):
        if turn == 2:
            names += [llm.add_request(prompt, greedy()) for prompt in PROMPTS[2:]]
        for output in llm.step():
            tokens = output.outputs[0].token_ids
            before = texts.get(output.request_id, [])
            assert tokens[:-1] == before and len(tokens) == len(before) + 1
            texts[output.request_id] = list(tokens)
            done += [output.request_id] if output.finished else []
        if not llm.has_unfinished() and turn > 2:
            break
    assert sorted(done) == sorted(names) and len(set(names)) == 4
    assert_greedy(reference(llm._path), PROMPTS, [texts[name] for name in names])
    assert llm.step() == []  # nothing to do is no error
    assert_clean(llm)


def test_request_ids(llm: LLM) -> None:
    assert llm.add_request([1], greedy(), request_id="mine") == "mine"
    with pytest.raises(ValueError, match="'mine' is in use"):
        llm.add_request([1], greedy(), request_id="mine")
    taken = llm.add_request([1], greedy(), request_id="0")
    assert llm.add_request([1], greedy()) not in ("mine", taken)
    while llm.has_unfinished():
        llm.step()
    assert llm.add_request([1], greedy(1), request_id="mine") == "mine"  # free again
    llm.step()
    assert_clean(llm)


def test_abort(llm: LLM) -> None:
    keep, drop = (llm.add_request(prompt, greedy(6)) for prompt in PROMPTS[:2])
    llm.step()
    llm.step()
    aborted = llm.abort(drop)
    assert aborted is not None and aborted.finished
    assert aborted.outputs[0].finish_reason == "abort"
    assert len(aborted.outputs[0].token_ids) == 2
    assert llm.abort(drop) is None and llm.abort("no such") is None
    finished = []
    while llm.has_unfinished():
        finished += [output.request_id for output in llm.step() if output.finished]
    assert finished == [keep]
    waiting = llm.add_request([1], greedy())
    assert llm.abort(waiting) is not None  # before its first step
    assert_clean(llm)


def test_a_bad_request_queues_nothing(llm: LLM) -> None:
    for prompt in ([], [VOCAB_SIZE], [1] * 96):
        with pytest.raises(ValueError, match="prompt 0"):
            llm.add_request(prompt, greedy())
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got dict"):
        llm.generate("x", {"max_tokens": 3})
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got str"):
        llm.add_request("r1", "a prompt", SamplingParams())
    with pytest.raises(TypeError, match="sampling_params"):
        llm.add_request([1], {"max_tokens": 3})
    with pytest.raises(ValueError, match="logprobs=321 exceeds the vocabulary of 320"):
        llm.add_request([1], greedy(logprobs=321))
    assert_clean(llm)


# -- stats ----------------------------------------------------------------------------------------


def test_stats(tiny_model: Make) -> None:
    llm = make(tiny_model("qwen3"), num_kvcache_blocks=50)
    stats = llm.stats
    assert (stats.num_blocks, stats.block_size, stats.steps) == (50, 4, [])
    assert stats.kv_bytes == 50 * 4 * llm.model_config.kv_bytes_per_token(4)
    assert stats.peak_blocks_in_use == 0 and stats.peak_kv_usage == 0.0
    prompts = [list(range(9)), list(range(50, 53))]
    llm.generate(prompts, greedy(5), use_tqdm=False)
    assert stats.prompt_tokens == 12 and stats.generated_tokens == 10
    assert stats.tokens_computed == 12 + 2 * 4  # the last token of each is only reported
    assert [step.phase for step in stats.steps] == ["prefill"] + ["decode"] * 4
    assert stats.steps[0].num_tokens == 12 and stats.steps[0].num_decode == 0
    assert all(step.num_rows == 2 and step.seconds > 0 for step in stats.steps)
    assert stats.peak_blocks_in_use == 4 + 2 and stats.peak_kv_usage == pytest.approx(6 / 50)
    assert stats.cached_tokens == stats.preemptions == 0
    llm.generate(prompts, greedy(5), use_tqdm=False)
    assert stats.cached_tokens == 8 and stats.steps[5].cached_tokens == 8
    llm.reset_prefix_cache()
    llm.generate(prompts, greedy(1), use_tqdm=False)
    assert stats.cached_tokens == 8
    stats.clear()
    assert stats.steps == [] and stats.prompt_tokens == 0 and stats.num_blocks == 50
    assert stats is llm.stats


def test_metrics_of_a_request(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2]], greedy(), use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.time_to_first_token is not None
    assert metrics.time_to_first_token > 0
    assert metrics.arrival_time < metrics.first_token_time <= metrics.finished_time


# -- parts ----------------------------------------------------------------------------------------


def test_own_parts_run_in_the_engine(tiny_model: Make, reference) -> None:
    calls: dict[str, int] = {}

    def counted(name: str, function):
        def part(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        return part

    class Manager(PrefixCache):
        def allocate(self, seq) -> int:
            calls["allocate"] = calls.get("allocate", 0) + 1
            return super().allocate(seq)

    class Planner(Scheduler):
        def admit(self, budget: int) -> list[Sequence]:
            calls["admit"] = calls.get("admit", 0) + 1
            return super().admit(budget)

    parts = {
        "rms_norm": counted("rms_norm", rms_norm),
        "attention": counted("attention", attention),
        "paged_decode": counted("paged_decode", paged_decode),
        "block_manager": Manager,
        "scheduler": Planner,
    }
    llm = make(tiny_model("qwen3"), parts=parts)
    outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    assert_greedy(reference(llm._path), PROMPTS, ids(outputs))
    assert calls["allocate"] == 4 and calls["admit"] > 0
    layers = 2
    assert calls["attention"] == layers * len(PROMPTS)  # the prompts; all at once
    assert calls["paged_decode"] == layers * 3
    assert isinstance(llm.engine.scheduler, Planner)


def test_a_part_that_is_never_reached_is_named(tiny_model: Make) -> None:
    """Llama has no q/k-norm and its own norms are reached; scaled RoPE skips the plain table."""
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    path = tiny_model("llama", rope_parameters=scaling)
    llm = make(path, parts={"rope_table": minivllm.ops.rope.rope_table, "rms_norm": rms_norm})
    with pytest.raises(RuntimeError, match=r"never reached .*\['rope_table'\]"):
        llm.generate([[1, 2]], greedy(2), use_tqdm=False)
    assert_clean(llm)
    with pytest.raises(RuntimeError, match="rope_table"):
        list(llm.stream([[1, 2]], greedy(2)))
    assert llm.generate([], greedy(2), use_tqdm=False) == []


def test_a_wrong_part_changes_the_text(tiny_model: Make, reference) -> None:
    """The check of the check: a given unit really is what runs, on either backend."""
    prompt = PROMPTS[2]
    expected = reference(tiny_model("qwen3")).greedy(prompt, 6)
    wrong = {
        "rms_norm": lambda x, weight, eps: rms_norm(x, weight, 0.5),
        "attention": lambda q, k, v, scale, q_start: attention(q, k, v, scale, 10**6),
        "paged_decode": lambda q, *rest: torch.zeros_like(q),
        "silu_mul": lambda x: x.chunk(2, -1)[1],
        "sample": lambda logits, batch, vocab_start=0: logits.argmin(-1),
    }
    for backend in ("torch", "sdpa"):
        for name, function in wrong.items():
            llm = make(tiny_model("qwen3"), parts={name: function}, attention_backend=backend)
            assert ids(llm.generate([prompt], greedy(6), use_tqdm=False)) != [expected], name


# -- construction ---------------------------------------------------------------------------------


def test_two_engines_in_one_process_do_not_meet(tiny_model: Make, reference) -> None:
    one, two = make(tiny_model("qwen3")), make(tiny_model("llama"), num_kvcache_blocks=30)
    for llm in (one, two, one):
        outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        assert_greedy(reference(llm._path), PROMPTS, ids(outputs))
    assert one.stats is not two.stats and two.stats.num_blocks == 30


def test_steps_leave_no_cycles_and_the_collector_runs_again(tiny_model: Make) -> None:
    """`generate` pauses the collector: what it leaves must go by reference counts alone."""
    llm = LLM(tiny_model("qwen3"), num_kvcache_blocks=64)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    llm.generate([[1, 2, 3]] * 4, params, use_tqdm=False)
    counts = []
    for length in (20, 40):
        gc.collect()
        llm.generate(
            [[1, 2, 3]] * 4,
            SamplingParams(max_tokens=length, ignore_eos=True, logprobs=1),
            use_tqdm=False,
        )
        counts.append(gc.collect())
    assert counts[1] <= counts[0] + 5  # garbage of a call, none of its steps
    assert gc.isenabled()
    with pytest.raises(ValueError):
        llm.generate([[10**9]], params, use_tqdm=False)
    assert gc.isenabled()
    gc.disable()
    try:
        llm.generate([[1]], params, use_tqdm=False)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_block_manager_may_hold_blocks_in_reserve(tiny_model: Make, reference) -> None:
    """A table longer than the context needs, and than the device's own table at the very end."""

    class Ahead(BlockManager):
        def allocate(self, seq: Any) -> Any:
            cached = super().allocate(seq)
            seq.block_table.append(self._take())
            return cached

    path = tiny_model("qwen3")
    options = {"max_model_len": 32, "num_kvcache_blocks": 20, "enable_prefix_caching": False}
    llm = LLM(path, parts={"block_manager": Ahead}, **options)
    batch = [list(range(5)), list(range(20)), list(range(29))]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    texts = [list(out.outputs[0].token_ids) for out in llm.generate(batch, params)]
    assert_greedy(reference(path), batch, texts)


def test_prompt_logprobs_are_scored_in_slices(tiny_model: Make, monkeypatch) -> None:
    llm = LLM(tiny_model("qwen3"), num_kvcache_blocks=64, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
    prompt = list(range(1, 12))
    whole = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    monkeypatch.setattr(model_runner, "SCORED_ROWS", 3)
    sizes = []
    logits = llm.engine.runner.model.logits
    monkeypatch.setattr(
        llm.engine.runner.model, "logits", lambda rows: sizes.append(len(rows)) or logits(rows)
    )
    sliced = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    assert sizes == [3, 3, 3, 1, 1]  # ten prompt tokens follow others; then the new one
    assert len(sliced) == len(whole) == 11 and sliced[0] is None
    for one, two in zip(sliced[1:], whole[1:], strict=True):
        assert one.keys() == two.keys()
        assert all(one[t].logprob == pytest.approx(two[t].logprob, abs=1e-5) for t in one)


def test_misspelt_option_costs_no_load(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(str(tmp_path / "nowhere"), max_num_seq=4)


def test_public_names() -> None:
    assert set(minivllm.__all__) >= {"LLM", "SamplingParams", "RequestOutput"}
    for name in minivllm.__all__:
        assert getattr(minivllm, name) is not None
    with pytest.raises(AttributeError, match="no_such"):
        minivllm.no_such  # noqa: B018


def test_reference_is_not_the_engine(tiny_model: Make) -> None:
    """The models under test say different things for different prompts: a dead cache would show."""
    refer = Reference(tiny_model("qwen3"))
    texts = {tuple(refer.greedy([token], 6)) for token in range(12)}
    assert len(texts) == 12 and len({t for text in texts for t in text}) > 20
