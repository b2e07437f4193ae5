"""The GGUF conversion against weights that are known, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.numpy import load_file

from gguf_builder import HEAD_DIM, HEADS, KV_HEADS, TOKENS, known_weights, to_llama_cpp
from minivllm.fetch.gguf_llama import convert_llama_gguf, unpermute_rope
from minivllm.hub import is_model_dir


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_config(tied, gguf_maker, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    convert_llama_gguf(gguf_maker.make(tied=tied), out, progress=False)
    assert is_model_dir(out)
    got, want = load_file(out / "model.safetensors"), known_weights(tied)
    assert got.keys() == want.keys()
    for name, weight in want.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], weight, err_msg=name)

    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HEAD_DIM
    assert config["vocab_size"] == len(TOKENS)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (5000.0, 1e-05)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 4), (9, 64), (2, 6)])
def test_unpermute_is_the_inverse(heads, dim):
    weight = np.arange(heads * dim * 5, dtype=np.float32).reshape(heads * dim, 5)
    permuted = to_llama_cpp(weight, heads)
    assert dim == 2 or not np.array_equal(permuted, weight)
    np.testing.assert_array_equal(unpermute_rope(permuted, heads), weight)


def test_quantised_values_are_kept_exactly():
    """float32 holds a dequantised Q4_1 or Q8_0 value; bfloat16 would not."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((4, 64), dtype=np.float32)
    for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        values = dequantize(quantize(weight, kind), kind)
        assert values.dtype == np.float32
        top_bits = values.view(np.uint32) & 0xFFFF0000
        assert not np.array_equal(top_bits, values.view(np.uint32))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"arch": "qwen2"}, "architecture 'qwen2'"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type 'yarn'"),
        ({"fields": {"llama.expert_count": 8}}, "expert_count"),
        ({"fields": {"llama.rope.dimension_count": 2}}, "dimension_count 2"),
        ({"extra": "rope_freqs.weight"}, "'rope_freqs.weight'"),
        ({"extra": "blk.0.attn_q.bias"}, "'blk.0.attn_q.bias'"),
        ({"extra": "blk.0.mystery.weight"}, "'blk.0.mystery.weight'"),
        ({"drop": "model.layers.1.mlp.up_proj.weight"}, "lacks 1 tensors.*layers.1.mlp.up_proj"),
        ({"drop": "model.norm.weight"}, "lacks 1 tensors.*model.norm.weight"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"tokenizer_model": "llama"}, "tokenizer model 'llama'"),
    ],
)
def test_refused_by_name(spoil, message, gguf_maker, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert_llama_gguf(gguf_maker.make(**spoil), tmp_path, progress=False)


def test_transformers_agrees_on_the_forward_pass(gguf_maker, tmp_path):
    """The written directory loads by its published meaning, and no weight is left random."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    out.mkdir()
    convert_llama_gguf(gguf_maker.make(), out, progress=False)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    want = known_weights(tied=True)
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), want[name])
