"""Token ids to text, a few ids at a time, as a stream of pieces that never change afterwards.

Owns the question "which text is final yet?": a character may be spread over several tokens, so a
piece goes out only once no later token can alter it. The pieces together are exactly what
`tokenizer.decode` gives for all ids at once. Never decodes the history again (each id costs O(1)),
never looks at stop strings, never encodes. Serves chapter 00 (text in, text out).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from minivllm.tokenizer import Tokenizer

# Decoder steps that treat each token by itself, or ask only whether it is the first one.
_PER_TOKEN = {"Replace", "Strip", "Metaspace", "WordPiece"}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class DecodeRules:
    """How one tokenizer turns ids into text; made once per tokenizer, shared by all its streams.

    `kind` is one of
      "bytes"   byte-level BPE: every token is a string of bytes, the text is their UTF-8 decoding;
      "pieces"  the text of a token depends on the token alone, except that the first may lose a
                blank and that a run of byte tokens (`<0xE4>`) is decoded together;
      "whole"   anything else: no text is final before the end.

    Args:
        backend: the `tokenizers` tokenizer.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        steps = _decoder_steps(backend)
        self.kind = _kind(steps)
        self._byte_runs = any(step["type"] == "ByteFallback" for step in steps)
        # Ask decode() itself what it skips: "special" has several sources there.
        self._special = frozenset(
            i
            for i in backend.get_added_tokens_decoder()
            if not backend.decode([i]) and backend.decode([i], skip_special_tokens=False)
        )
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str | None] = {}
        self._byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        self._anchor: list[int] = []
        self._anchor_text = ""
        if self.kind == "pieces" and not self._find_anchor():
            self.kind = "whole"

    def visible(self, token_id: int, skip_special: bool) -> bool:
        """Tell whether decode() uses the id: it is in the vocabulary and not to be skipped."""
        if skip_special and token_id in self._special:
            return False
        return 0 <= token_id < 2**32 and self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a visible token (kind "bytes")."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) or ""
            # One character stands for one byte, but an added token may be ordinary text.
            if all(char in self._byte_of for char in token):
                known = bytes(self._byte_of[char] for char in token)
            else:
                known = token.encode("utf-8")
            self._bytes[token_id] = known
        return known

    def piece(self, token_id: int) -> str | None:
        """Return a visible token's text in mid-stream, None for a byte token (kind "pieces")."""
        if token_id not in self._pieces:
            token = self._backend.id_to_token(token_id) or ""
            is_byte = self._byte_runs and _BYTE_TOKEN.fullmatch(token)
            self._pieces[token_id] = None if is_byte else self.tail([token_id])
        return self._pieces[token_id]

    def tail(self, ids: list[int]) -> str:
        """Return the text of visible ids that do not begin the stream (kind "pieces")."""
        # Decoded behind a token whose text is known, so that nothing is taken for the beginning.
        text = self._backend.decode(self._anchor + ids, skip_special_tokens=False)
        return text[len(self._anchor_text) :]

    def _find_anchor(self) -> bool:
        """Choose a plain token, such as "a", that decodes to itself at the beginning."""
        vocab = self._backend.get_vocab(with_added_tokens=False)
        for token, token_id in sorted(vocab.items(), key=lambda item: item[1]):
            if token.isascii() and token.isalnum():
                if self._backend.decode([token_id], skip_special_tokens=False) == token:
                    self._anchor, self._anchor_text = [token_id], token
                    return True
        return False


class IncrementalDetokenizer:
    """The text of one sequence, growing with its tokens.

    Args:
        tokenizer: whose `decode` the joined pieces equal.
        skip_special_tokens: as for `decode`.

    An id that the tokenizer does not know contributes nothing. U+FFFD comes out only where decode()
    of all ids has it too: for bytes that are no UTF-8, or for a character cut off at the very end.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._rules = tokenizer.decode_rules
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []  # visible ids whose text is not final
        self._at_start = True  # nothing emitted: the decoder may still take a blank from the front
        self._emitted: list[str] = []
        self._closed = False

    @property
    def text(self) -> str:
        """All text emitted so far."""
        # Joined on demand: `text += piece` at each token would copy the whole text each time.
        if len(self._emitted) > 1:
            self._emitted = ["".join(self._emitted)]
        return self._emitted[0] if self._emitted else ""

    def append(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that became final. ValueError after flush()."""
        if self._closed:
            raise ValueError("append() after flush(): the stream has ended")
        rules = self._rules
        # Ids that decode() ignores are dropped here: a run of byte tokens goes on across them.
        ids = [int(i) for i in ids]
        ids = [i for i in ids if rules.visible(i, self._skip)]
        if rules.kind == "bytes":
            # The codec keeps an unfinished character to itself.
            piece = self._utf8.decode(b"".join(map(rules.token_bytes, ids)))
        elif rules.kind == "pieces":
            piece = "".join(map(self._append_piece, ids))
        else:
            self._held += ids
            piece = ""
        return self._emit(piece)

    def pending(self) -> str:
        """Return what flush() would, without ending the stream.

        Costs O(held ids). For stop strings: the line feed of a SentencePiece vocabulary is a byte
        token, final only once the next token is known, yet a "\\n" to stop at is already there.
        """
        if self._rules.kind == "bytes":
            return self._utf8.getstate()[0].decode("utf-8", "replace")
        if not self._held:
            return ""
        if self._rules.kind == "pieces" and not self._at_start:
            return self._rules.tail(self._held)
        return self._tokenizer.decode(self._held, skip_special_tokens=False)

    def flush(self) -> str:
        """End the stream and return the rest of its text ('' when called again)."""
        piece = self.pending()
        self._closed = True
        self._held = []
        self._utf8.reset()
        return self._emit(piece)

    def _append_piece(self, token_id: int) -> str:
        piece = self._rules.piece(token_id)
        if not self._held and not self._at_start and piece is not None:
            return piece  # the common case: one look-up
        self._held.append(token_id)
        # One byte that is no UTF-8 turns its whole run into U+FFFD: the run waits for its end.
        if piece is None:
            return ""
        text = self.pending()
        # '' at the start: perhaps a lone blank that was stripped, which counts for the next token.
        if text or not self._at_start:
            self._at_start = False
            self._held = []
        return text

    def _emit(self, piece: str) -> str:
        if piece:
            self._emitted.append(piece)
        return piece


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []  # decode() then joins the tokens by blanks
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _kind(steps: list[dict[str, Any]]) -> str:
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return "bytes"
    fuse = names.index("Fuse") if "Fuse" in names else len(names)
    # Before Fuse a step sees tokens, behind it the whole text: only a left strip is local there.
    local = all(name in _PER_TOKEN or name == "ByteFallback" for name in names[:fuse])
    strips_left = all(s["type"] == "Strip" and not s["stop"] for s in steps[fuse + 1 :])
    return "pieces" if local and strips_left else "whole"


def _byte_alphabet() -> list[str]:
    """Return, for each byte, the character that byte-level BPE writes for it.

    Printable Latin-1 stands for itself; the other 68 bytes take the code points from 256 up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
