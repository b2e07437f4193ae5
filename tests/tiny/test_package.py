"""The bundled model: its files agree with each other and fit the size limit."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors import safe_open

from minivllm.tiny import MODEL_DIR
from minivllm.tiny.export import END_IDS, FILES, MANIFEST_FILE, SIZE_LIMIT
from minivllm.tokenizer import Tokenizer

CONFIG = json.loads((MODEL_DIR / "config.json").read_text())
GENERATION = json.loads((MODEL_DIR / "generation_config.json").read_text())
TOKENIZER = Tokenizer.from_dir(MODEL_DIR)


def test_the_files_are_there_and_small_enough():
    assert sorted(p.name for p in MODEL_DIR.iterdir()) == sorted(FILES)
    assert sum(p.stat().st_size for p in MODEL_DIR.iterdir()) <= SIZE_LIMIT


def test_the_weights_have_the_shapes_of_the_config():
    hidden, heads, kv = (
        CONFIG[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    assert heads != kv and CONFIG["tie_word_embeddings"]
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as file:
        names = file.keys()
        shapes = {name: file.get_slice(name).get_shape() for name in names}
        embedding = file.get_tensor("model.embed_tokens.weight")
        assert all(file.get_tensor(name).isfinite().all() for name in names)
    assert embedding.dtype == torch.bfloat16
    assert "lm_head.weight" not in shapes
    assert shapes["model.embed_tokens.weight"] == [CONFIG["vocab_size"], hidden]
    prefix = f"model.layers.{CONFIG['num_hidden_layers'] - 1}.self_attn."
    assert shapes[prefix + "q_proj.weight"] == [heads * CONFIG["head_dim"], hidden]
    assert shapes[prefix + "k_proj.weight"] == [kv * CONFIG["head_dim"], hidden]
    assert shapes[prefix + "q_norm.weight"] == [CONFIG["head_dim"]]
    layers = {int(m[1]) for n in shapes if (m := re.match(r"model\.layers\.(\d+)\.", n))}
    assert layers == set(range(CONFIG["num_hidden_layers"]))
    count = sum(torch.Size(s).numel() for s in shapes.values())
    assert 3_000_000 <= count <= 5_000_000


def test_the_end_ids_are_the_end_tokens():
    assert GENERATION["eos_token_id"] == END_IDS
    assert [TOKENIZER.id_to_token(i) for i in END_IDS] == ["<|im_end|>", "<|endoftext|>"]
    assert TOKENIZER.id_to_token(CONFIG["pad_token_id"]) == "<|pad|>"
    assert TOKENIZER.eos_token == "<|im_end|>" and TOKENIZER.bos_token_id is None
    assert TOKENIZER.vocab_size == CONFIG["vocab_size"]


@pytest.mark.parametrize("text", ["Once upon a time", "2 + 3 = 5", "naïve 猫 🐈\n\n  x", ""])
def test_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_the_chat_template_renders_with_and_without_a_system_message():
    messages = [{"role": "user", "content": "Hello!"}]
    plain = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.render_chat(messages) == plain
    system = [{"role": "system", "content": "Be kind."}, *messages]
    assert TOKENIZER.render_chat(system) == "<|im_start|>system\nBe kind.<|im_end|>\n" + plain
    ids = TOKENIZER.encode_chat(messages)
    assert ids[0] == 1 and ids.count(2) == 1


def test_the_chat_template_writes_what_was_trained():
    from tokenizers import Tokenizer as Raw

    from minivllm.tiny.data import IDS, Encoder

    turns = [("Hello!", "Hello!"), ("What is 2 + 3?", "Two plus three is five.")]
    document = Encoder(Raw.from_file(str(MODEL_DIR / "tokenizer.json"))).chat(turns, "Be kind.")
    messages = [{"role": "system", "content": "Be kind."}]
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    rendered = TOKENIZER.encode_chat(messages, add_generation_prompt=False)
    assert rendered == (document[:-1] & IDS).tolist()


def test_card_and_manifest_belong_to_these_weights():
    manifest = json.loads(MANIFEST_FILE.read_text())
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert manifest["files"][name] == (MODEL_DIR / name).stat().st_size
    card = (MODEL_DIR / "README.md").read_text()
    assert f"{manifest['training']['parameters']:,} parameters" in card
    assert len(re.findall(r"^\d+\. Once upon a time", card, re.MULTILINE)) == 24
    assert "apache-2.0" in card and "Do not trust its facts" in card
    assert "{" not in card
