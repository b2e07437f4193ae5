"""Rebuilds tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Owns the translation of llama.cpp's token table (tokens, merges, token types, chat template) into
the `tokenizers` library's format. It handles byte-level BPE only, with the pre-tokenizers listed
below; a wrong pre-tokenizer would give other ids for digits and spaces without any error, so an
unknown one is refused by name. Serves chapter 00.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

# llama.cpp's token types; 1 is an ordinary token.
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(fields: dict[str, Any], out_dir: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json of the GGUF metadata `fields` to `out_dir`."""
    build_tokenizer(fields).save(str(out_dir / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # The generic class, on purpose: a named one (GPT2Tokenizer) is rebuilt by transformers 5
        # with its own pre-tokenizer, which would no longer split digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The `tokenizers.Tokenizer` of the GGUF metadata; ValueError names what is unsupported."""
    model = fields.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"GGUF tokenizer model {model!r} cannot be converted; only 'gpt2' can")
    if fields.get("tokenizer.ggml.add_bos_token") or fields.get("tokenizer.ggml.add_eos_token"):
        raise ValueError("GGUF tokenizers that add BOS or EOS by themselves cannot be converted")
    tokens = fields["tokenizer.ggml.tokens"]
    # Merges are "left right"; a byte-level token never contains a real space.
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(str(fields.get("tokenizer.ggml.pre")))
    tokenizer.decoder = decoders.ByteLevel()

    types = fields.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    # These are in the vocabulary already, so they keep their ids.
    tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The split before BPE that llama.cpp calls `name`."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        # Every digit alone: "2024" is four tokens, and " 7" a space and a digit.
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    raise ValueError(f"GGUF pre-tokenizer {name!r} cannot be converted; 'smollm' and 'gpt-2' can")
