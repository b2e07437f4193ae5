"""Trains the byte-level BPE tokenizer of the tiny model and writes its files.

Owns the special tokens, the chat template and tokenizer_config.json. Trains no model and reads
no weights. The 256 bytes are all in the vocabulary, so every text can be encoded; digits stand
alone, so that "12" is two tokens and small sums stay readable to a small model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END, PAD)
MAX_POSITION = 1024

# ChatML. No default system message: the model was mostly trained without one.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str] | Iterator[str], vocab_size: int = 4096) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries (2,048 to 65,536), the four special tokens first.

    The upper limit is what the encoded data can hold: ids share 16 bits with a flag.
    """
    if not 300 <= vocab_size <= 0x7FFF:
        raise ValueError(f"vocab_size is {vocab_size}, must be from 300 to {0x7FFF}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The content of tokenizer_config.json: no BOS, generation ends at <|im_end|>."""
    return {
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for i, token in enumerate(SPECIALS)
        },
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": PAD,
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITION,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory` (made if missing)."""
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
