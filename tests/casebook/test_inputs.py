"""What callers pass in: K08 K10 K21 K37 K48 K49 K66."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from casebook_tools import G, assert_clean, ids, make_llm, run
from minivllm import LLM, SamplingParams
from minivllm.engine.engine import Engine
from tiny_models import assert_greedy

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
@pytest.mark.parametrize("call", ["generate", "stream", "add_request"])
def test_k08_prompt_longer_than_the_context(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], call: str, depth: int
) -> None:
    llm = make_llm(tiny_model(), max_model_len=32, depth=depth)
    for prompt in ([5] * 40, "x" * 40, {"prompt": "x" * 40}, {"prompt_token_ids": [5] * 40}):
        with pytest.raises(ValueError) as error:
            if call == "add_request":
                llm.add_request(prompt, G(4))
            else:
                getattr(llm, call)([prompt], G(4))
        assert "40" in str(error.value) and "32" in str(error.value)
        assert_clean(llm)
    assert ids(run(llm, [[5] * 8], G(4))) == [reference(tiny_model()).greedy([5] * 8, 4)]


def test_k08_prompt_larger_than_the_pool(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model(), num_kvcache_blocks=3)
    for length in (12, 13, 100):
        with pytest.raises(ValueError, match=rf"{length} tokens.* 12 tokens"):
            llm.generate([[5] * length], G(4))
        assert_clean(llm)
    assert len(ids(run(llm, [[5] * 11], G(4)))[0]) == 2


def test_k10_unknown_options_are_named(tiny_model: Callable[..., Path]) -> None:
    path = str(tiny_model())
    for name, hint in [("max_num_seq", "max_num_seqs"), ("blocksize", ""), ("quantization", "")]:
        with pytest.raises(TypeError, match=f"{name!r}.*{hint}"):
            LLM(path, **{name: 4})
    # Before the model is looked for: a typo must not cost a download.
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM("no/such-model", max_num_seq=4)
    for name, hint in [("temprature", "temperature"), ("max_token", "max_tokens"), ("foo", "")]:
        with pytest.raises(TypeError, match=f"{name!r}.*{hint}"):
            SamplingParams(**{name: 0})
    with pytest.raises(ValueError, match="rms_nrom.*rms_norm"):
        LLM(path, parts={"rms_nrom": lambda x: x})
    llm = make_llm(path)
    for call in (llm.generate, llm.stream):
        with pytest.raises(TypeError, match="sampling_parms"):
            call([[1]], sampling_parms=G(1))  # type: ignore[operator]
    with pytest.raises(ValueError, match="prompt_token_id"):
        llm.generate([{"prompt_token_id": [1]}], G(1))
    assert_clean(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": -1},
        {"max_num_seqs": 2.0},
        {"max_num_seqs": True},
        {"max_num_seqs": None},
        {"max_model_len": 0},
        {"max_num_batched_tokens": 0},
        {"kvcache_block_size": 0},
        {"num_kvcache_blocks": -5},
        {"num_kvcache_blocks": 0},
        {"dtype": "int8"},
        {"dtype": "half"},
        {"device": "tpu"},
        {"device": "gpu"},
        {"load_format": "pt"},
        {"attention_backend": "xformers"},
        {"attention_backend": "flash_attn"},
        {"kv_cache_dtype": "int4"},
        {"enforce_eager": "yes"},
        {"enable_prefix_caching": 1},
        {"seed": "a"},
        {"seed": None},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": float("nan")},
        {"gpu_memory_utilization": "0.9"},
        {"parts": {"rms_norm": 3}},
        {"parts": ["rms_norm"]},
    ],
    ids=str,
)
def test_k10_option_values_are_checked(
    tiny_model: Callable[..., Path], options: dict[str, Any]
) -> None:
    name = next(iter(options))
    with pytest.raises((TypeError, ValueError), match=name):
        LLM(str(tiny_model()), **{"device": "cpu", "num_kvcache_blocks": 8, **options})


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": 1.5},
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"max_tokens": 2.5},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [3]},
        {"stop": 3},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": 3},
        {"seed": 1.5},
        {"seed": "x"},
        {"logprobs": -1},
        {"logprobs": True},
        {"prompt_logprobs": -1},
        {"min_p": 1.5},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 4},
        {"bad_words": ["x"]},
        {"best_of": 3},
        {"guided_decoding": object()},
    ],
    ids=str,
)
def test_k10_sampling_values_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(fields))):
        SamplingParams(**fields)


EMPTY: list[Any] = ["", [], (), {"prompt": ""}, {"prompt_token_ids": []}, np.array([], dtype=int)]


@pytest.mark.parametrize("prompt", EMPTY, ids=repr)
def test_k21_empty_prompt(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], prompt: Any
) -> None:
    path = tiny_model()
    llm = make_llm(path)
    for position in range(3):
        prompts: list[Any] = [[1, 2], [3]]
        prompts.insert(position, prompt)
        with pytest.raises((ValueError, TypeError), match=f"prompt {position}"):
            llm.generate(prompts, G(2))
        assert_clean(llm)
        with pytest.raises((ValueError, TypeError), match=f"prompt {position}"):
            llm.stream(prompts, G(2))
        assert_clean(llm)
    with pytest.raises((ValueError, TypeError), match="prompt 0"):
        llm.add_request(prompt, G(2))
    assert_clean(llm)
    assert ids(run(llm, [[3]], G(2))) == [reference(path).greedy([3], 2)]


def test_k21_empty_calls(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model())
    assert run(llm, [], G(2)) == []
    assert list(llm.stream([], G(2))) == []
    for prompts in ("", [""], [[]]):
        with pytest.raises(ValueError, match="prompt 0"):
            llm.generate(prompts, G(2))
    with pytest.raises(ValueError):
        llm.chat([[]], G(2))
    assert_clean(llm)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3.5,
        [1.0, 2.0],
        [1, "a"],
        ["a", 1],
        [[1, 2], None],
        [[1, True]],
        [True, False],
        [[1, [2]]],
        b"ab",
        [b"ab"],
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        [torch.tensor([5]), torch.tensor([7])],
        [np.array([5]), np.array([7])],
        {1, 2},
        [{"prompt": 5}],
        [{"prompt_token_ids": "ab"}],
        [{}],
        [{"prompt_token_ids": [1], "multi_modal_data": {}}],
        [[-1]],
        [[320]],
        [[0, 10**30]],
    ],
    ids=repr,
)
def test_k21_inputs_of_a_wrong_kind(tiny_model: Callable[..., Path], prompt: Any) -> None:
    llm = make_llm(tiny_model())
    with pytest.raises((TypeError, ValueError), match="prompt"):
        llm.generate(prompt, G(2))
    assert_clean(llm)


def test_k21_inputs_of_every_right_kind(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model())
    expected = ids(run(llm, [[97, 98]], G(3)))
    same: list[Any] = [
        [97, 98],
        (97, 98),
        ([97, 98],),
        [np.int64(97), np.int32(98)],
        {"prompt_token_ids": [97, 98]},
        [{"prompt": "anything", "prompt_token_ids": [97, 98]}],
        [{"prompt": None, "prompt_token_ids": (97, 98)}],
        range(97, 99),
    ]
    for prompt in same:
        assert ids(run(llm, prompt, G(3))) == expected, prompt
    text = run(llm, "ab", G(3))
    assert text[0].prompt == "ab" and text[0].prompt_token_ids == [64, 65]
    assert len(run(llm, ["ab", "cd"], [G(1), G(2)])) == 2


@pytest.mark.parametrize("size", [2, 4])
def test_k37_tensor_parallel_is_refused_before_anything_starts(
    tiny_model: Callable[..., Path], size: int
) -> None:
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={size}\b"):
        make_llm(tiny_model(), tensor_parallel_size=size)
    for bad in (0, -1, 1.5):
        with pytest.raises((ValueError, TypeError), match="tensor_parallel_size"):
            make_llm(tiny_model(), tensor_parallel_size=bad)
    assert psutil.Process().children() == []


def test_k37_heads_that_do_not_divide_are_refused(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    for kv_heads in (3, 8, -1, "2", 2.0):
        path = copy_model(tiny_model(), num_key_value_heads=kv_heads)
        with pytest.raises(ValueError, match=rf"num_key_value_heads.*{kv_heads}"):
            make_llm(path)


@DEPTHS
@pytest.mark.parametrize(
    "bad", [[7] * 9999, [], [320], [1.5], None, "\ud800"], ids=lambda b: repr(b)[:9]
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_k48_one_bad_prompt_leaves_nothing(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], call: str, bad: Any, depth: int
) -> None:
    llm = make_llm(tiny_model(), depth=depth)
    with pytest.raises((ValueError, TypeError), match=r"prompt 2|surrogate"):
        getattr(llm, call)([[1, 2], [3, 4], bad], G(3))
    assert_clean(llm)
    with pytest.raises((ValueError, TypeError)):
        getattr(llm, call)([[1, 2], [3, 4]], [G(3)])  # one set of parameters too few
    with pytest.raises((ValueError, TypeError)):
        getattr(llm, call)([[1, 2], [3, 4]], [G(3), {"temperature": 0}])
    assert_clean(llm)
    assert ids(run(llm, [[5]], G(1))) == [reference(tiny_model()).greedy([5], 1)]


@DEPTHS
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["forward", "logits", "collect", "schedule", "complete"])
def test_k48_failure_inside_a_step(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[BaseException],
    depth: int,
) -> None:
    path = tiny_model()
    llm = make_llm(
        path, num_kvcache_blocks=9, max_num_batched_tokens=6, max_num_seqs=3, depth=depth
    )
    runner: Any = llm.engine.runner
    owner = {
        "forward": runner.model.model,
        "logits": runner.model,
        "collect": runner,
        "schedule": llm.engine.scheduler,
        "complete": llm.engine.scheduler,
    }[where]
    original = getattr(owner, where)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9] * 4, [1, 2, 3, 4, 9]]
    for fail_at in (1, 2, 3, 7):
        calls = 0

        def failing(*args: Any, fail_at: int = fail_at) -> Any:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise error("on purpose")
            return original(*args)

        monkeypatch.setattr(owner, where, failing)
        with pytest.raises(error, match="on purpose"):
            llm.generate(prompts, G(9), use_tqdm=False)
        monkeypatch.undo()
        assert_clean(llm)
        assert len(run(llm, [[5]], G(3))) == 1
    outputs = run(llm, prompts, G(9))
    assert_greedy(reference(path), prompts, ids(outputs))


@DEPTHS
def test_k48_interrupt_between_any_two_lines(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    """Ctrl-C may strike in the middle of a change: at every n-th line that the engine executes."""
    path = tiny_model()
    llm = make_llm(
        path, num_kvcache_blocks=6, max_num_batched_tokens=6, max_num_seqs=3, depth=depth
    )
    folder = str(Path(sys.modules[Engine.__module__].__file__ or "").parent)
    rng = random.Random(0)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9] * 3, [1, 2, 3, 4, 9]]
    params = [G(6), G(8), G(5, n=2), G(7)]
    lines_left = 0
    armed = True

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines_left, armed
        if not armed or not frame.f_code.co_filename.startswith(folder):
            return None
        # Only inside a step: that is where a call spends its time.
        if event == "line":
            lines_left -= 1
            if lines_left <= 0 and _inside_step(frame):
                armed = False
                raise KeyboardInterrupt("between two lines")
        return trace

    struck = 0
    for _ in range(70):
        lines_left, armed = rng.randrange(1, 6000), True
        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            llm.generate(prompts, params, use_tqdm=False)
        except KeyboardInterrupt:
            struck += 1
        finally:
            sys.settrace(previous)
        assert_clean(llm)
    assert struck > 20
    outputs = run(llm, prompts, params)
    assert_greedy(reference(path), prompts, ids(outputs))


def _inside_step(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is Engine._step.__code__:
            return True
        if frame.f_code is Engine.reset.__code__:
            return False
        frame = frame.f_back
    return False


@DEPTHS
def test_k48_a_left_stream_leaves_nothing(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    llm = make_llm(tiny_model(), depth=depth)
    for _ in llm.stream([[1, 2, 3], [4, 5]], G(20, n=2)):
        break
    assert_clean(llm)
    open_stream = llm.stream([[1, 2, 3], [4, 5]], G(20))
    next(open_stream)
    for call in (lambda: llm.generate([[1]], G(1)), lambda: llm.add_request([1], G(1)), llm.step):
        with pytest.raises(RuntimeError, match="another call"):
            call()
    open_stream.close()
    assert_clean(llm)
    assert ids(run(llm, [[5]], G(3))) == [reference(tiny_model()).greedy([5], 3)]


def test_k48_generate_does_not_touch_foreign_requests(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    llm = make_llm(tiny_model())
    name = llm.add_request([1, 2, 3], G(5), request_id="mine")
    with pytest.raises(ValueError, match="mine"):
        llm.add_request([4], G(5), request_id="mine")
    with pytest.raises(RuntimeError, match="add_request"):
        llm.generate([[4]], G(2))
    last = None
    while llm.has_unfinished():
        for output in llm.step():
            last = output
    assert last is not None and last.request_id == name
    assert ids([last]) == [reference(tiny_model()).greedy([1, 2, 3], 5)]
    assert llm.abort("mine") is None
    assert_clean(llm)


@DEPTHS
def test_k48_abort_then_the_next_call(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    llm = make_llm(tiny_model(), depth=depth)
    for steps in range(4):
        name = llm.add_request([1, 2, 3], G(20, n=2))
        for _ in range(steps):
            llm.step()
        aborted = llm.abort(name)
        assert aborted is not None and aborted.finished
        assert {sample.finish_reason for sample in aborted.outputs} == {"abort"}
        # The only request is gone: the next call must work whatever is still in flight.
        assert ids(run(llm, [[5]], G(3))) == [reference(tiny_model()).greedy([5], 3)]


@DEPTHS
@pytest.mark.parametrize("limit", [16, 18, 4, 2])
def test_k49_prompt_exactly_as_long_as_the_context(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], limit: int, depth: int
) -> None:
    llm = make_llm(tiny_model(), max_model_len=limit, depth=depth)
    prompt = [2] * (limit - 1)
    outputs = run(llm, [prompt], G(8))
    assert ids(outputs) == [reference(tiny_model()).greedy(prompt, 1)]
    assert outputs[0].outputs[0].finish_reason == "length"
    for length in (limit, limit + 1):
        with pytest.raises(ValueError, match=rf"{length} tokens.*max_model_len={limit}"):
            llm.generate([[2] * length], G(8))
        assert_clean(llm)


def test_k49_no_room_for_any_prompt(tiny_model: Callable[..., Path]) -> None:
    llm = make_llm(tiny_model(), max_model_len=1)
    with pytest.raises(ValueError, match="max_model_len=1"):
        llm.generate([[2]], G(1))
    llm = make_llm(tiny_model(), num_kvcache_blocks=1, kvcache_block_size=1)
    with pytest.raises(ValueError, match=r"KV cache of 1"):
        llm.generate([[2]], G(1))


@DEPTHS
def test_k66_one_output_a_prompt_in_order(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], depth: int
) -> None:
    llm = make_llm(tiny_model(), max_model_len=64, max_num_seqs=2, depth=depth)
    prompts = [[1, 2, 3], [7] * 500, [4, 5, 6]]
    with pytest.raises(ValueError, match="prompt 1"):
        llm.generate(prompts, G(3))
    assert_clean(llm)
    rng = random.Random(1)
    many = [[rng.randrange(320) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    many += [many[0], many[3], many[3]]
    caps = [G(rng.randint(1, 9)) for _ in many]
    outputs = run(llm, many, caps)
    assert [output.prompt_token_ids for output in outputs] == many
    assert [len(tokens) for tokens in ids(outputs)] == [cap.max_tokens for cap in caps]
    assert_greedy(reference(tiny_model()), many, ids(outputs))
    # A request that ends at once, one that fills the context, one that stops: still in place.
    stop = reference(tiny_model()).greedy([8, 9], 4)
    mixed = [[8, 9], [3] * 63, [8, 9], [1]]
    params = [G(4, stop_token_ids=[stop[2]]), G(50), G(1), G(3, n=2)]
    outputs = run(llm, mixed, params)
    assert [output.prompt_token_ids for output in outputs] == mixed
    first = stop.index(stop[2]) + 1
    assert [len(o.outputs[0].token_ids) for o in outputs] == [first, 1, 1, 3]
    assert len(outputs[3].outputs) == 2


def test_k66_mutating_the_callers_lists_changes_nothing(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    llm = make_llm(tiny_model())
    prompt = [1, 2, 3]
    outputs = run(llm, [prompt, prompt], G(4))
    assert prompt == [1, 2, 3]
    prompt.append(9)
    assert outputs[0].prompt_token_ids == [1, 2, 3]
    outputs[0].prompt_token_ids.append(7)
    assert outputs[1].prompt_token_ids == [1, 2, 3]
    assert outputs[0].outputs[0].token_ids is not outputs[1].outputs[0].token_ids
