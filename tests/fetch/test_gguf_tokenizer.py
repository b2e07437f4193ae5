"""The rebuilt tokenizer: ids by hand, digits apart, control tokens special, text round-trips."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from gguf_builder import MERGES, TOKENS
from minivllm.fetch.gguf_tokenizer import build_tokenizer, write_tokenizer

FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ 'é' }}",
}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return build_tokenizer(FIELDS)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["he", "ll", "o"]),
        (" w", ["Ġw"]),
        # The merge "2 2" exists, but digits never meet.
        ("222", ["2", "2", "2"]),
        # The space before a number stands alone, and two spaces there form one piece.
        ("a 22", ["a", "Ġ", "2", "2"]),
        ("<|im_start|>he<|im_end|>", ["<|im_start|>", "he", "<|im_end|>"]),
        ("<|im_start", ["<", "|", "i", "m", "_", "s", "t", "a", "r", "t"]),
        ("é", ["Ã", "©"]),
        ("", []),
    ],
)
def test_tokens(tokenizer, text, tokens):
    assert tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize(
    "text",
    [
        "  two  spaces  ",
        "tab\tand\r\nlines\n\n",
        "東京 🎉 👨‍👩‍👧 e\u0301",
        "x²³ ٣ 12.5%",
        "\x00\x7f",
        "it's",
    ],
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_keep_their_ids(tokenizer):
    assert tokenizer.get_vocab_size() == len(TOKENS)
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([1, 2, 0]) == ""


def test_gpt2_pre_tokenizer_does_not_split_digits():
    assert build_tokenizer(FIELDS | {"tokenizer.ggml.pre": "gpt-2"}).encode("22").tokens == ["22"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("model", "llama"), ("pre", "qwen2"), ("add_bos_token", True), ("add_eos_token", True)],
)
def test_refused(key, value):
    with pytest.raises(ValueError, match="cannot be converted"):
        build_tokenizer(FIELDS | {f"tokenizer.ggml.{key}": value})


def test_written_files_mean_the_same_to_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(FIELDS, tmp_path, max_length=64)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == "{{ 'é' }}"
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    # transformers needs a config.json to choose a tokenizer class.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "hello w22 <|im_end|>\n é"
    assert theirs(text)["input_ids"] == build_tokenizer(FIELDS).encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.pad_token_id == 2 and theirs.unk_token_id == 0
