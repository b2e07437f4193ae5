"""Small tokenizers of the two great families, and model directories that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(merges: list[tuple[str, str]] | None = None, bos: str | None = None) -> Backend:
    """GPT-2's family: ids 0-255 are single bytes, then merges, then the special tokens.

    With `bos`, a post-processor puts that special token in front.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges if merges is not None else [("Ġ", "a"), ("h", "e"), ("l", "l"), ("he", "ll")]
    vocab = {char: i for i, char in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    if bos:
        known = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=known
        )
    return backend


def byte_ids(backend: Backend, data: bytes) -> list[int]:
    """The ids of `data` in a byte_level() tokenizer, one token a byte."""
    # Latin-1 has a character for every byte; the pre-tokenizer's table is tested elsewhere.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    char = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [backend.token_to_id(char[b]) for b in data]


def llama2(decoder: str = "sequence") -> Backend:
    """Llama 2's family: "▁" for blanks, 256 byte tokens for what the vocabulary lacks.

    `decoder` is "sequence" (Replace, ByteFallback, Fuse, Strip) or "metaspace".
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", *"abcdehlortuw.,!", "▁a", "he", "ll", "hell", "▁the", "▁hell"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "hell")]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = Backend(model)
    if decoder == "sequence":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return backend


def word_level(decoder: Any = None) -> Backend:
    """One token a word, as the plainest test tokenizers have it."""
    words = ["[UNK]", "a", "b", "##c", "don", "'", "t", ".", "x</w>", "y"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    if decoder is not None:
        backend.decoder = decoder
    return backend


def save_dir(path: Path, backend: Backend, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json (with `config` in it); return `path`."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
