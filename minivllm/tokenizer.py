"""Text to token ids and back, as the model's own files define it.

Owns the tokenizer of one model directory: tokenizer.json, the special tokens that
tokenizer_config.json names, the rule that a prompt begins with exactly one BOS. Chat templates are
rendered in `chat_template.py`, streams of tokens turned to text in `detokenizer.py`. Never imports
torch, and transformers only for a directory without tokenizer.json. Serves chapter 00.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from minivllm.chat_template import ChatTemplate, choose_template, load_templates, named_templates
from minivllm.detokenizer import DecodeRules

logger = logging.getLogger(__name__)

# The named special tokens of tokenizer_config.json; templates see them under these names.
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_TEMPLATES = 8  # compiled templates kept; each costs some 10 ms to compile


class Tokenizer:
    """A vocabulary, its special tokens and its chat templates.

    Args:
        backend: the `tokenizers` tokenizer. Its truncation and padding are switched off.
        special_tokens: {"bos_token": "<s>", ...}; a text that is not in the vocabulary has id None.
        chat_templates: {name: Jinja source}; the main one is called "default".
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may carry settings of its training: prompts cut without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self._compiled: dict[str, ChatTemplate] = {}
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = backend.token_to_id(self.bos_token) if self.bos_token else None
        self.eos_token_id = backend.token_to_id(self.eos_token) if self.eos_token else None
        # What is really put in front: the post-processor knows, not the config's `add_bos_token`.
        empty, letter = backend.encode("").ids, backend.encode("a").ids
        self._front = empty[:1] if empty[:1] == letter[:1] else []

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load a model directory's tokenizer; ValueError names what is missing or broken."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            return _from_transformers(directory)
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception, whatever is wrong
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        names = _read_json(directory / "special_tokens_map.json")
        # A config that lists its added tokens is the newer of the two files: it outranks the other.
        config = {**names, **config} if "added_tokens_decoder" in config else {**config, **names}
        special = _special_texts(config)
        _add_missing(backend, config, special)
        return cls(
            backend, special_tokens=special, chat_templates=load_templates(directory, config)
        )

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included (a model's logits may be wider)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The main chat template's source."""
        return self.chat_templates.get("default")

    @cached_property
    def decode_rules(self) -> DecodeRules:
        """What an IncrementalDetokenizer needs to know of this tokenizer."""
        return DecodeRules(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        With `add_special_tokens` the tokenizer's own BOS (if it has that habit) is put in front,
        unless the text begins with it already, as the output of a chat template does.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            # Half of a surrogate pair; the library calls it "not a str".
            bad = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if bad is None:
                raise
            raise ValueError(
                f"text[{bad}] is a lone surrogate ({text[bad]!r}), no character"
            ) from None
        # Two in front, one of them the tokenizer's: the text brought the other (case K64).
        if add_special_tokens and self._front and ids[:2] == self._front * 2:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; an id without entry adds '', bytes that are no UTF-8 U+FFFD."""
        # The library ignores unknown ids, but not those that do not fit in its 32 bits.
        known = [int(i) for i in ids if 0 <= i < 2**32]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id, None if it has no entry."""
        return self._backend.id_to_token(int(token_id)) if 0 <= token_id < 2**32 else None

    def render_chat(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: list of {"role", "content"}; content is a string or a list of text parts.
            add_generation_prompt: open an assistant turn at the end.
            continue_final_message: leave the last message open (needs add_generation_prompt=False).
            chat_template: Jinja text, or the name of one of `chat_templates`.
            tools: JSON schemas of functions.
            **kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
            TypeError, ValueError: for bad messages (by index), a missing template, or what the
                template itself refuses.
        """
        source = choose_template(self.chat_templates, chat_template, tools is not None)
        return self._template(source).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **kwargs},
        )

    def encode_chat(self, messages: object, **options: Any) -> list[int]:
        """Return the ids of `render_chat(messages, **options)`, with no BOS but the template's."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _template(self, source: str) -> ChatTemplate:
        if source not in self._compiled:
            if len(self._compiled) >= _MAX_TEMPLATES:
                self._compiled.clear()
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(data).__name__}")
    return data


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: text}; an entry is a string or a saved AddedToken ({"content": text, ...})."""
    texts = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name} must be a string or an AddedToken, got {value!r:.80}")
        if text:
            texts[name] = text
    return texts


def _add_missing(backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Teach the backend the tokens that only tokenizer_config.json knows to be added or special."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {k: v for k, v in entry.items() if k != "__type"}
        if flags["content"] in added:
            continue
        # The backend numbers new tokens itself: an entry is good only if it gets the id it claims.
        expected = backend.token_to_id(flags["content"])
        if int(token_id) != (backend.get_vocab_size() if expected is None else expected):
            logger.warning("tokenizer_config.json: id %s of %r ignored", token_id, flags["content"])
            continue
        backend.add_tokens([AddedToken(**flags)])
        added.add(flags["content"])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, Mapping) else extra
    for token in [*special.values(), *extra]:
        text = token["content"] if isinstance(token, Mapping) else token
        # One that has no id in the vocabulary has no row in the model either: left out.
        if text not in added and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _from_transformers(directory: Path) -> Tokenizer:
    """Let transformers read an older format (vocab.json + merges.txt, tokenizer.model)."""
    if not directory.is_dir():
        raise ValueError(f"no such model directory: {directory}")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{directory} has no tokenizer.json; other formats need `pip install transformers`"
        ) from error
    try:
        slow = AutoTokenizer.from_pretrained(str(directory))
        backend = slow.backend_tokenizer
    except Exception as error:  # anything from a missing file to a missing package
        raise ValueError(f"no usable tokenizer in {directory}: {error}") from error
    special = {name: str(text) for name, text in slow.special_tokens_map.items()}
    return Tokenizer(
        backend, special_tokens=special, chat_templates=named_templates(slow.chat_template)
    )
