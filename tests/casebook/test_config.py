"""What a checkpoint says about itself: K18 K22 K59, and the quantised config of K26."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from casebook_tools import G, ids, make_llm, record_logits, run
from minivllm import SamplingParams
from minivllm.config import ModelConfig
from tiny_models import FAMILIES, assert_greedy

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"max_position_embeddings": 256}


def prompt_of(length: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (length,), generator=generator).tolist()


def check_logits(path: Path, reference: Any, tolerance: float = 1e-3, **options: Any) -> None:
    """Prefill logits of prompts up to 200 tokens, and a few decoded tokens, equal transformers'."""
    prompts = [prompt_of(length) for length in (1, 31, 33, 100, 200)]
    for budget in (512, 30):
        llm = make_llm(path, max_num_batched_tokens=budget, max_num_seqs=1, **options)
        seen = record_logits(llm)
        for prompt in prompts:
            seen.clear()
            run(llm, [prompt], G(1))
            expected = reference.logits(prompt)[-1]
            torch.testing.assert_close(seen[-1][0], expected, atol=tolerance, rtol=1e-4)
        assert_greedy(reference, prompts, ids(run(llm, prompts, G(6))))


SCALINGS = [
    # The table does not depend on the family: llama stands for all where nothing else does.
    *[
        ("llama", rope)
        for rope in (
            {"rope_type": "default"},
            {"rope_type": "default", "rope_theta": 1e6},
            {"rope_type": "linear", "factor": 4.0},
            {**LLAMA3, "rope_theta": 500000.0},
        )
    ],
    *[(family, rope) for family in FAMILIES for rope in (LLAMA3, YARN)],
]


@pytest.mark.parametrize(
    ("family", "rope"),
    SCALINGS,
    ids=[f"{f}-{'-'.join(map(str, r.values()))}"[:40] for f, r in SCALINGS],
)
def test_k18_scaled_rope_equals_transformers(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    family: str,
    rope: dict[str, Any],
) -> None:
    path = tiny_model(family, rope_parameters={"rope_theta": 10000.0, **rope}, **LONG)
    check_logits(path, reference(path))


@pytest.mark.parametrize(
    "extra",
    [
        {"original_max_position_embeddings": None},
        {"original_max_position_embeddings": 32},
        {"attention_factor": 1.3},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 0.8},
        {"truncate": False},
        {"factor": 1.0},
    ],
    ids=str,
)
def test_k18_yarn_with_every_option(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], extra: dict[str, Any]
) -> None:
    rope = {"rope_theta": 10000.0, **YARN, **extra}
    rope = {key: value for key, value in rope.items() if value is not None}
    path = tiny_model("qwen3", rope_parameters=rope, **LONG)
    check_logits(path, reference(path))


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3"},
        {**LLAMA3, "type": "llama3"},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        None,
    ],
    ids=str,
)
def test_k18_older_spelling(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    scaling: dict[str, Any] | None,
) -> None:
    # The same checkpoint, with the config spelt as published ones are.
    rope_type = (scaling or {}).get("type", "default")
    modern = {k: v for k, v in (scaling or {}).items() if k != "type"}
    path = tiny_model(
        "llama", rope_parameters={**modern, "rope_type": rope_type, "rope_theta": 20000.0}, **LONG
    )
    old = copy_model(
        path,
        rope_parameters=...,
        rope_theta=20000.0,
        rope_scaling=scaling,
        dtype=...,
        torch_dtype="float32",
    )
    check_logits(old, reference(path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "foo", "factor": 2}}, "foo"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "longrope"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "mrope"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": {"factor": 8}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": None, "model_type": "falcon"}, "falcon"),
        ({"dtype": "float8_e4m3fn"}, "float8"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"bits": 4}}, "quantization"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compress"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
    ids=str,
)
def test_k18_k26_fields_that_change_the_maths_are_refused_by_name(
    tiny_model: Callable[..., Path],
    copy_model: Callable[..., Path],
    change: dict[str, Any],
    named: str,
) -> None:
    if "rope_scaling" in change:
        change = {"rope_parameters": ..., **change}
    with pytest.raises(ValueError, match=named):
        make_llm(copy_model(tiny_model(), **change))


HEAD_DIMS: list[tuple[str, Any]] = [
    *[(family, value) for family in FAMILIES for value in (16, ..., None, 0)],
    # transformers' Qwen2 always has hidden / heads.
    *[(family, value) for family in FAMILIES if family != "qwen2" for value in (8, 32)],
]


@pytest.mark.parametrize(("family", "head_dim"), HEAD_DIMS, ids=str)
def test_k22_one_rule_for_head_dim(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    family: str,
    head_dim: Any,
) -> None:
    real = 16 if head_dim in (..., None, 0) else head_dim
    made = tiny_model(family, **({} if family == "qwen2" else {"head_dim": real}))
    path = copy_model(made, head_dim=head_dim)
    for backend in ("sdpa", "torch"):
        llm = make_llm(path, attention_backend=backend)
        runner: Any = llm.engine.runner
        assert runner.kv_cache.shape[-1] == real
        assert runner.model.rope[0].shape[-1] == real // 2
        assert llm.stats.kv_bytes == runner.kv_cache.numel() * 4
        prompts = [prompt_of(9), prompt_of(2)]
        assert_greedy(reference(made), prompts, ids(run(llm, prompts, G(5))))


@pytest.mark.parametrize("head_dim", [..., None, 0])
def test_k22_no_head_dim_and_no_even_split(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], head_dim: Any
) -> None:
    path = copy_model(tiny_model("llama"), hidden_size=60, num_attention_heads=8, head_dim=head_dim)
    with pytest.raises(ValueError, match=r"hidden_size=60.*num_attention_heads=8"):
        make_llm(path)


@pytest.mark.parametrize("head_dim", [-16, 2.5, "16", True, 15])
def test_k22_head_dim_that_is_none(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], head_dim: Any
) -> None:
    with pytest.raises(ValueError, match=rf"head_dim.*{head_dim}"):
        make_llm(copy_model(tiny_model("llama"), head_dim=head_dim))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3), (3, 1)])
def test_k22_groups_of_every_size(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], heads: tuple[int, int]
) -> None:
    path = tiny_model(
        "llama", num_attention_heads=heads[0], num_key_value_heads=heads[1], hidden_size=48
    )
    prompts = [prompt_of(9), prompt_of(2)]
    for backend in ("sdpa", "torch"):
        llm = make_llm(path, attention_backend=backend, max_num_batched_tokens=4)
        assert_greedy(reference(path), prompts, ids(run(llm, prompts, G(5))))


def test_k22_kv_heads_absent_means_as_many_as_heads(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
) -> None:
    made = tiny_model("llama", num_key_value_heads=4)
    for value in (..., None):
        llm = make_llm(copy_model(made, num_key_value_heads=value))
        assert ids(run(llm, [[1, 2, 3]], G(4))) == [reference(made).greedy([1, 2, 3], 4)]


def test_k22_sliding_window_fits_or_is_refused(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
) -> None:
    path = tiny_model("mistral")
    windowed = copy_model(path, sliding_window=32)
    with pytest.raises(ValueError, match="sliding window of 32"):
        make_llm(windowed)
    llm = make_llm(windowed, max_model_len=32)
    assert_greedy(reference(path), [prompt_of(20)], ids(run(llm, [prompt_of(20)], G(12))))
    # Qwen states a window and says with another field that it is off.
    unused = copy_model(tiny_model("qwen2"), sliding_window=32, use_sliding_window=False)
    raw = json.loads((unused / "config.json").read_text())
    raw.pop("layer_types", None)
    (unused / "config.json").write_text(json.dumps(raw))
    make_llm(unused)
    raw.update(use_sliding_window=True, max_window_layers=1)
    (unused / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="sliding window of 32"):
        make_llm(unused)


# -- K59 ------------------------------------------------------------------------------------------


def greedy_prompt(reference: Any) -> tuple[list[int], list[int]]:
    """A prompt whose first five greedy tokens are all different, and its 20 tokens."""
    for start in range(50):
        prompt = [start, 7, 5]
        tokens = reference.greedy(prompt, 20)
        if len(set(tokens[:5])) == 5:
            return prompt, tokens
    raise AssertionError("no such prompt")


def stops_at(path: Path, prompt: list[int], at: int | None, tokens: list[int]) -> None:
    """Greedy text of `prompt` ends right behind token `at` (None: at 20), whatever the depth."""
    for depth in (0, 1):
        llm = make_llm(path, depth=depth)
        output = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
        expected = tokens if at is None else tokens[: at + 1]
        assert output.token_ids == expected
        assert output.finish_reason == ("length" if at is None else "stop")
        ignoring = run(llm, [prompt], G(20))[0].outputs[0]
        assert (ignoring.token_ids, ignoring.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("place", ["config", "generation"])
@pytest.mark.parametrize("form", ["int", "list", "long list"])
def test_k59_eos_in_either_file_as_number_or_list(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    place: str,
    form: str,
) -> None:
    prompt, tokens = greedy_prompt(reference(tiny_model()))
    unused = next(t for t in range(320) if t not in tokens)
    value = {"int": tokens[2], "list": [tokens[2]], "long list": [unused, tokens[2], tokens[4]]}
    path = copy_model(tiny_model(), **({"eos_token_id": value[form]} if place == "config" else {}))
    generation = {"eos_token_id": value[form]} if place == "generation" else {"eos_token_id": None}
    (path / "generation_config.json").write_text(json.dumps(generation))
    stops_at(path, prompt, 2, tokens)


def test_k59_union_of_three_sources(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
) -> None:
    prompt, tokens = greedy_prompt(reference(tiny_model()))
    path = copy_model(tiny_model(), eos_token_id=tokens[4])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[3]]}))
    stops_at(path, prompt, 3, tokens)
    (path / "generation_config.json").write_text(json.dumps({}))
    stops_at(path, prompt, 4, tokens)
    (path / "generation_config.json").unlink()
    stops_at(path, prompt, 4, tokens)
    raw = json.loads((path / "tokenizer.json").read_text())
    spelt = {i: token for token, i in raw["model"]["vocab"].items()}
    for at in (1, 2):
        if tokens[at] in spelt:
            config = json.loads((path / "tokenizer_config.json").read_text())
            config["eos_token"] = spelt[tokens[at]]
            (path / "tokenizer_config.json").write_text(json.dumps(config))
            stops_at(path, prompt, at, tokens)
            break
    else:
        pytest.fail("choose another prompt: neither token is in the tokenizer")


def test_k59_no_eos_anywhere(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], copy_model: Callable[..., Path]
) -> None:
    prompt, tokens = greedy_prompt(reference(tiny_model()))
    path = copy_model(tiny_model(), eos_token_id=...)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    stops_at(path, prompt, None, tokens)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / file).unlink()
    stops_at(path, prompt, None, tokens)


def test_k59_who_stopped_is_reported(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], copy_model: Callable[..., Path]
) -> None:
    prompt, tokens = greedy_prompt(reference(tiny_model()))
    path = copy_model(tiny_model(), eos_token_id=[tokens[2], 0])
    llm = make_llm(path)
    # An eos id: the last of token_ids is the one that stopped. A stop id of the caller: by name.
    eos = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    assert (eos.finish_reason, eos.token_ids[-1], eos.stop_reason) == ("stop", tokens[2], None)
    for extra in ([tokens[1]], [tokens[3], tokens[1]]):
        params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=extra)
        own = run(llm, [prompt], params)[0].outputs[0]
        assert (own.finish_reason, own.stop_reason) == ("stop", tokens[1])
        assert own.token_ids == tokens[:2]
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[tokens[2]]
    )
    own = run(llm, [prompt], params)[0].outputs[0]
    assert (own.finish_reason, own.stop_reason, own.token_ids) == ("stop", tokens[2], tokens[:3])


def test_k59_eos_as_the_last_allowed_token_is_a_stop(
    tiny_model: Callable[..., Path], reference: Callable[..., Any], copy_model: Callable[..., Path]
) -> None:
    prompt, tokens = greedy_prompt(reference(tiny_model()))
    llm = make_llm(copy_model(tiny_model(), eos_token_id=tokens[2]))
    output = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0]
    assert (output.finish_reason, output.token_ids) == ("stop", tokens[:3])
    # An eos token inside the prompt ends nothing.
    inside = [*prompt, tokens[2], 9]
    output = run(llm, [inside], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0]
    assert output.token_ids == reference(tiny_model()).greedy(inside, 3)[: len(output.token_ids)]


def test_k59_bad_eos_is_named(tiny_model: Callable[..., Path]) -> None:
    raw = json.loads((tiny_model() / "config.json").read_text())
    for value in ("x", ["x"], 1.5, {"a": 1}, [None], True):
        with pytest.raises(ValueError, match="eos_token_id"):
            ModelConfig.from_dict({**raw, "eos_token_id": value})
