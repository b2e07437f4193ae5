"""From the files of a checkpoint to the model: K26 K43 K60."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from casebook_tools import G, ids, make_llm, record_logits, run
from tiny_models import FAMILIES, assert_greedy

PROMPTS = [[1, 2, 3], [300, 5, 77, 8, 9, 41], [6]]
L0, L1 = "model.layers.0.", "model.layers.1."


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the tensors of a directory in place; `change` may return a new dict."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors = change(tensors) or tensors
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    return path


def drop(tensors: dict[str, torch.Tensor], *names: str) -> None:
    for name in names:
        del tensors[name]


def shard(path: Path, count: int, reverse: bool = False) -> list[Path]:
    """Split the one file into `count` shards with an index, as large checkpoints come."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors, reverse=reverse)
    files, weight_map = [], {}
    for i in range(count):
        file = path / f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part, file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file.name))
        files.append(file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


# -- K26 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix",
    [
        ".qweight",
        ".qzeros",
        ".scales",
        ".weight_scale",
        ".weight_scale_inv",
        ".weight_packed",
        ".g_idx",
        ".SCB",
        ".weight.absmax",
    ],
)
def test_k26_quantised_names_without_the_config(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], suffix: str
) -> None:
    old = L0 + "self_attn.q_proj.weight"
    new = L0 + "self_attn.q_proj" + suffix

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    with pytest.raises(ValueError, match=f"{new}.*quant") as error:
        make_llm(rewrite(copy_model(tiny_model()), rename))
    assert "\n" not in str(error.value)
    assert psutil.Process().children() == []

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[new] = torch.ones(3)

    with pytest.raises(ValueError, match=f"{new}.*quant"):
        make_llm(rewrite(copy_model(tiny_model()), add))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_k26_weights_that_are_no_floats(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], dtype: torch.dtype
) -> None:
    # Name and shape are right; without their scales the numbers mean nothing.
    name = L1 + "mlp.down_proj.weight"

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    with pytest.raises(ValueError, match=f"{name}.*{str(dtype).removeprefix('torch.')}"):
        make_llm(rewrite(copy_model(tiny_model()), convert))


def test_k26_config_is_enough_and_comes_first(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    path = copy_model(tiny_model(), quantization_config={"quant_method": "gptq"})
    (path / "model.safetensors").unlink()  # refused before any weight is looked for
    with pytest.raises(ValueError, match="gptq"):
        make_llm(path)


# -- K43 ------------------------------------------------------------------------------------------

MISSING = {
    "qwen3": [
        L1 + "self_attn.k_proj.weight",
        L1 + "self_attn.q_proj.weight",
        L0 + "self_attn.v_proj.weight",
        L0 + "self_attn.o_proj.weight",
        L0 + "mlp.up_proj.weight",
        L1 + "mlp.gate_proj.weight",
        L1 + "mlp.down_proj.weight",
        L0 + "self_attn.q_norm.weight",
        L1 + "self_attn.k_norm.weight",
        L1 + "input_layernorm.weight",
        L0 + "post_attention_layernorm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
    "qwen2": [L0 + "self_attn.k_proj.bias", L1 + "self_attn.v_proj.bias"],
}


@pytest.mark.parametrize(("family", "name"), [(f, n) for f, ns in MISSING.items() for n in ns])
def test_k43_a_missing_tensor_is_named(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], family: str, name: str
) -> None:
    path = rewrite(copy_model(tiny_model(family)), lambda tensors: drop(tensors, name))
    with pytest.raises(ValueError, match=f"missing.*{name}"):
        make_llm(path)


def test_k43_every_tensor_of_every_family_is_needed(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    for family in FAMILIES:
        made = tiny_model(family, tie_word_embeddings=False, num_hidden_layers=1)
        for name in load_file(made / "model.safetensors"):
            path = copy_model(made)
            rewrite(path, lambda tensors, name=name: drop(tensors, name))  # type: ignore[misc]
            with pytest.raises(ValueError, match=f"missing.*{name}"):
                make_llm(path)
            shutil.rmtree(path)


def test_k43_several_missing_are_listed(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    gone = [L0 + "self_attn.k_proj.weight", L1 + "mlp.up_proj.weight", "model.norm.weight"]
    path = rewrite(copy_model(tiny_model()), lambda tensors: drop(tensors, *gone))
    with pytest.raises(ValueError, match="3 tensors are missing") as error:
        make_llm(path)
    assert all(name in str(error.value) for name in gone)
    # More layers in the config than in the file.
    with pytest.raises(ValueError, match=r"missing.*model\.layers\.2\."):
        make_llm(copy_model(tiny_model(), num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"missing.*lm_head\.weight"):
        make_llm(copy_model(tiny_model(), tie_word_embeddings=False))


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("tied", [True, False])
def test_k43_shards(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    tied: bool,
    count: int,
) -> None:
    made = tiny_model(tie_word_embeddings=tied)
    path = copy_model(made)
    files = shard(path, count, reverse=count == 3)
    # With an index only its shards are read: not this one beside them.
    save_file({"model.norm.weight": torch.zeros(64)}, path / "consolidated.safetensors")
    assert_greedy(reference(made), PROMPTS, ids(run(make_llm(path), PROMPTS, G(6))))
    files[1].unlink()
    with pytest.raises(ValueError, match=files[1].name):
        make_llm(path)
    files[0].unlink()
    with pytest.raises(ValueError, match=files[0].name):
        make_llm(path)
    # Without the index, what the missing shards held is missing by name.
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"missing|\.safetensors"):
        make_llm(path)


def test_k43_an_index_that_lies(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    path = copy_model(tiny_model())
    shard(path, 2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    for broken in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'):
        index.write_text(broken)
        with pytest.raises(ValueError, match=r"index\.json|safetensors"):
            make_llm(path)
    # A tensor that the index names and its shard does not hold, needed or not.
    one = next(iter(good.values()))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(good, one)}))
    with pytest.raises(ValueError, match="missing"):
        make_llm(path)


def test_k43_unexpected_names_are_reported(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    extras = [
        "model.layers.9.foo",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.xq_proj.weight",
        "embed_tokens.weight",
        "visual.blocks.0.attn.qkv.weight",
    ]
    for extra in extras:
        caplog.clear()
        path = copy_model(tiny_model())
        rewrite(path, lambda tensors, extra=extra: tensors.update({extra: torch.ones(2)}))  # type: ignore[misc]
        with caplog.at_level(logging.WARNING):
            llm = make_llm(path)
        assert extra in caplog.text
        assert_greedy(reference(tiny_model()), PROMPTS, ids(run(llm, PROMPTS, G(4))))


def test_k43_known_harmless_names_are_silent(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = copy_model(tiny_model())
    name = L0 + "self_attn.rotary_emb.inv_freq"
    rewrite(path, lambda tensors: tensors.update({name: torch.zeros(8)}))
    with caplog.at_level(logging.WARNING):
        llm = make_llm(path)
    assert caplog.text == ""
    assert_greedy(reference(tiny_model()), PROMPTS, ids(run(llm, PROMPTS, G(4))))


@pytest.mark.parametrize("name", ["model.norm.weight", L0 + "self_attn.k_proj.weight"])
@pytest.mark.parametrize("how", ["longer", "shorter", "flat", "scalar", "transposed"])
def test_k43_a_wrong_shape_is_named(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], name: str, how: str
) -> None:
    if how == "transposed" and name == "model.norm.weight":
        name = L0 + "mlp.down_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        t = tensors[name]
        tensors[name] = {
            "longer": lambda: torch.cat([t, t]),
            "shorter": lambda: t[: len(t) // 2],
            "flat": lambda: t.flatten()[None, None],
            "scalar": lambda: torch.tensor(1.0),
            "transposed": lambda: t.t(),
        }[how]()

    with pytest.raises(ValueError, match=f"{name}.*shape"):
        make_llm(rewrite(copy_model(tiny_model()), change))


def test_k43_files_that_are_absent_or_broken(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = copy_model(tiny_model())
    file = path / "model.safetensors"
    data = file.read_bytes()
    for broken in (b"", data[:4], data[:200], data[: len(data) // 2], b"version https://git-lfs"):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            make_llm(path)
    file.unlink()
    with pytest.raises(ValueError, match=r"no \*?\.?safetensors|safetensors"):
        make_llm(path)
    torch.save({}, path / "pytorch_model.bin")  # an older format alone is not enough
    with pytest.raises(ValueError, match="safetensors"):
        make_llm(path)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        make_llm(path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        make_llm(empty)
    with pytest.raises(ValueError, match="nowhere"):
        make_llm(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_k43_stored_types_are_converted(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path], dtype: torch.dtype
) -> None:
    path = copy_model(tiny_model(), dtype="bfloat16")
    rewrite(path, lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
    llm = make_llm(path)
    runner: Any = llm.engine.runner
    assert {p.dtype for p in runner.model.parameters()} == {torch.float32}
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(runner.model.model.embed_tokens.weight, stored.float())
    assert len(ids(run(llm, PROMPTS, G(4)))) == 3


def test_k43_dummy_weights_need_no_file(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    path = copy_model(tiny_model())
    (path / "model.safetensors").unlink()
    state = torch.random.get_rng_state()
    first, second, third = (
        ids(run(make_llm(path, load_format="dummy", seed=seed), PROMPTS, G(6)))
        for seed in (1, 1, 2)
    )
    assert first == second != third
    assert torch.equal(state, torch.random.get_rng_state())


# -- K60 ------------------------------------------------------------------------------------------


def test_k60_tied_without_a_head(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    path = tiny_model()
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    llm = make_llm(path)
    assert llm.engine.runner.model.lm_head is None  # type: ignore[attr-defined]
    assert_greedy(reference(path), PROMPTS, ids(run(llm, PROMPTS, G(6))))


@pytest.mark.parametrize("order", ["first", "last", "own shard first", "own shard last"])
@pytest.mark.parametrize("different", [False, True])
def test_k60_tied_with_a_head_in_the_file(
    tiny_model: Callable[..., Path],
    reference: Callable[..., Any],
    copy_model: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    different: bool,
    order: str,
) -> None:
    made = tiny_model()
    path = copy_model(made)
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding.clone()
    if different:
        head = torch.randn(head.shape, generator=torch.Generator().manual_seed(5)) * 0.5
    # safetensors sorts by name within a file, so the order is made with two files.
    names = {"first": "model-00001.safetensors", "last": "model-00003.safetensors"}
    (path / "model.safetensors").unlink()
    where = names["first" if "first" in order else "last"]
    save_file(tensors, path / "model-00002.safetensors")
    save_file({"lm_head.weight": head}, path / where)
    if "own shard" in order:
        weight_map = dict.fromkeys(tensors, "model-00002.safetensors")
        index = {"weight_map": {**weight_map, "lm_head.weight": where}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        llm = make_llm(path)
    model = llm.engine.runner.model  # type: ignore[attr-defined]
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert ("lm_head.weight differs" in caplog.text) == different
    seen = record_logits(llm)
    run(llm, [PROMPTS[1]], G(1))
    truth = reference(made)
    if different:
        with torch.no_grad():
            hidden = truth.model.model(torch.tensor([PROMPTS[1]])).last_hidden_state[0, -1]
        torch.testing.assert_close(seen[0][0], hidden @ head.T, atol=1e-4, rtol=1e-4)
    else:
        assert model.lm_head is None
        torch.testing.assert_close(seen[0][0], truth.logits(PROMPTS[1])[-1], atol=1e-4, rtol=1e-4)


def test_k60_untied_with_a_head(
    tiny_model: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    for family in FAMILIES:
        path = tiny_model(family, tie_word_embeddings=False)
        llm = make_llm(path)
        seen = record_logits(llm)
        outputs = run(llm, PROMPTS[:1], G(1))
        expected = reference(path).logits(PROMPTS[0])[-1]
        torch.testing.assert_close(seen[0][0], expected, atol=1e-4, rtol=1e-4)
        assert ids(outputs) == [[int(expected.argmax())]]
        assert_greedy(reference(path), PROMPTS, ids(run(llm, PROMPTS, G(6))))


def test_k60_equal_head_in_a_lower_precision_is_the_same(
    tiny_model: Callable[..., Path],
    copy_model: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = copy_model(tiny_model())

    def lower(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        low = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        return {**low, "lm_head.weight": low["model.embed_tokens.weight"].clone()}

    with caplog.at_level(logging.WARNING):
        llm = make_llm(rewrite(path, lower))
    assert caplog.text == "" and llm.engine.runner.model.lm_head is None  # type: ignore[attr-defined]


def test_k60_a_tied_head_of_a_wrong_shape_is_named(
    tiny_model: Callable[..., Path], copy_model: Callable[..., Path]
) -> None:
    path = copy_model(tiny_model())
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(300, 64)}))
    with pytest.raises(ValueError, match=r"lm_head\.weight.*shape"):
        make_llm(path)
