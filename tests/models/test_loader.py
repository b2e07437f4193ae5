"""Loading: which files are read, where tensors go, and that every one is accounted for.

What a user sees of a broken checkpoint is in `casebook/test_weights.py`; here are the pieces.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.config import ModelConfig
from minivllm.models.decoder import CausalLM
from minivllm.models.loader import iterate_tensors, load_model, weight_files
from minivllm.ops.table import build_ops

Make = Callable[..., Path]


def load(path: Path, dtype: torch.dtype = torch.float32, **options) -> CausalLM:
    return load_model(
        path,
        ModelConfig.from_dir(path),
        build_ops("torch", {}),
        max_position=32,
        dtype=dtype,
        device=torch.device("cpu"),
        **options,
    )


def state(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_parameters()}


def shard(path: Path, parts: int) -> list[Path]:
    """Split model.safetensors into shards with an index, as large checkpoints are published."""
    single = path / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    weight_map, files = {}, []
    for part in range(parts):
        name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({key: tensors[key] for key in names}, path / name)
        weight_map |= dict.fromkeys(names, name)
        files.append(path / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def test_packed_weights(tiny_model: Make) -> None:
    """q, k, v and gate, up stand below each other in one matrix, biases likewise."""
    path = tiny_model("qwen2")
    tensors, model = load_file(path / "model.safetensors"), load(path)
    for number, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{number}"
        for kind in ("weight", "bias"):
            names = [f"{prefix}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            packed = getattr(layer.self_attn.qkv_proj, kind)
            assert torch.equal(packed, torch.cat([tensors[name] for name in names]))
        names = [f"{prefix}.mlp.{part}_proj.weight" for part in ("gate", "up")]
        packed = layer.mlp.gate_up_proj.weight
        assert torch.equal(packed, torch.cat([tensors[name] for name in names]))


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_every_parameter_is_filled(name: str, tiny_model: Make) -> None:
    """As many numbers in the model as in the file, and each parameter's sum is there."""
    path = tiny_model(name, tie_word_embeddings=name == "qwen3")
    tensors, model = load_file(path / "model.safetensors"), load(path)
    tensors.pop("lm_head.weight" if name == "qwen3" else "", None)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers == sum(tensor.numel() for tensor in tensors.values())
    total = sum(float(parameter.double().sum()) for parameter in model.parameters())
    assert total == pytest.approx(sum(float(t.double().sum()) for t in tensors.values()))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shards_are_the_same_model(parts: int, tiny_model: Make, copy_model: Make) -> None:
    path = copy_model(tiny_model("llama", tie_word_embeddings=False))
    whole = state(load(path))
    files = shard(path, parts)
    assert weight_files(path) == files
    loaded = state(load(path))
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_stray_files_beside_shards_are_not_read(tiny_model: Make, copy_model: Make) -> None:
    path = copy_model(tiny_model("qwen3"))
    whole = state(load(path))
    tensors = load_file(path / "model.safetensors")
    files = shard(path, 2)
    wrong = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name in ("consolidated.safetensors", "model.safetensors", "z.safetensors"):
        save_file(wrong, path / name)
    assert weight_files(path) == files
    loaded = state(load(path))
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_single_file_beside_a_stray_one(tiny_model: Make, copy_model: Make) -> None:
    path = copy_model(tiny_model("qwen3"))
    (path / "consolidated.safetensors").write_bytes(b"broken")
    assert weight_files(path) == [path / "model.safetensors"]
    load(path)


def test_any_safetensors_without_index_or_usual_name(tiny_model: Make, copy_model: Make) -> None:
    path = copy_model(tiny_model("qwen3"))
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert weight_files(path) == [path / "weights.safetensors"]
    assert len(list(iterate_tensors(path))) == len(load_file(path / "weights.safetensors"))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_conversion(
    stored: torch.dtype, wanted: torch.dtype, tiny_model: Make, copy_model: Make
) -> None:
    path = copy_model(tiny_model("qwen3"))
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor.to(stored) for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    model = load(path, wanted)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    embedding = tensors["model.embed_tokens.weight"].to(wanted)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.rope is not None and model.rope[0].dtype == torch.float32  # never less


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_misshapen_tensors_are_named(name: str, tiny_model: Make, copy_model: Make) -> None:
    path = copy_model(tiny_model("qwen3"))
    tensors = load_file(path / "model.safetensors")
    right = tensors[name]
    for wrong in (right[:-1], right[None], right.reshape(-1)[:1].reshape(()), right.repeat(2, 1)):
        save_file({**tensors, name: wrong.contiguous()}, path / "model.safetensors")
        with pytest.raises(ValueError, match=f"{name}.*shape.*is expected"):
            load(path)


def test_names_are_not_matched_by_substring(
    tiny_model: Make, copy_model: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A vision tower's layers, or a name that only ends like ours, must not be taken for ours."""
    path = copy_model(tiny_model("qwen3"))
    whole = state(load(path))
    tensors = load_file(path / "model.safetensors")
    foreign = {
        "vision.model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 64),
        "model.layers.0.self_attn.q_proj.weight_extra": torch.zeros(1),
        "model.layers.7.mlp.up_proj.weight": torch.zeros(96, 64),
        "model.layers.0.self_attn.qkv_proj.weight": torch.zeros(128, 64),
    }
    save_file({**tensors, **foreign}, path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        loaded = state(load(path))
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    assert all(name in caplog.text for name in foreign)


def test_dummy_weights_are_seeded(tiny_model: Make) -> None:
    path = tiny_model("qwen2")
    one, same, other = (state(load(path, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(value.isfinite().all() for value in one.values())
