"""The stream of pieces is exactly decode() of all ids, and no piece splits a character."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from minivllm.detokenizer import IncrementalDetokenizer
from minivllm.tokenizer import Tokenizer
from tokenizer_builders import byte_ids, byte_level, llama2, word_level


def stream(tok: Tokenizer, ids: list[int], skip: bool = True, chunk: int = 1) -> list[str]:
    """Feed `ids`, `chunk` at a time; return the pieces, flush() last. Checks what always holds."""
    detok = IncrementalDetokenizer(tok, skip_special_tokens=skip)
    pieces = []
    for i in range(0, len(ids), chunk):
        pieces.append(detok.append(ids[i : i + chunk]))
        assert detok.text == "".join(pieces)
        # pending() is what would follow if the stream ended here.
        seen = ids[: i + chunk]
        assert detok.text + detok.pending() == tok.decode(seen, skip_special_tokens=skip)
    pieces.append(detok.flush())
    assert detok.flush() == "" and detok.pending() == ""
    assert "".join(pieces) == detok.text == tok.decode(ids, skip_special_tokens=skip)
    return pieces


ALL_BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "llama2": llama2,
    "metaspace": lambda: llama2("metaspace"),
    "no_decoder": word_level,
    "wordpiece": lambda: word_level(decoders.WordPiece()),
    "bpe_suffix": lambda: word_level(decoders.BPEDecoder("</w>")),
}


def test_k63_byte_level_one_byte_a_token() -> None:
    tok = Tokenizer(byte_level())
    text = "A 世a😀é"
    ids = byte_ids(tok._backend, text.encode())
    assert len(ids) == 12  # 1 + 1 + 3 + 1 + 4 + 2 bytes
    pieces = stream(tok, ids)
    assert "".join(pieces) == text
    assert [p for p in pieces if p] == list(text)
    assert pieces[-1] == ""


def test_k63_byte_fallback_one_byte_a_token() -> None:
    tok = Tokenizer(llama2())
    text = "A 世a😀é"
    ids = [tok._backend.token_to_id("▁")]  # the blank in front that the decoder strips
    ids += [tok._backend.token_to_id(f"<0x{b:02X}>") for b in text.encode()]
    pieces = stream(tok, ids)
    assert "".join(pieces) == text
    ids.append(tok._backend.token_to_id("a"))
    assert "".join(stream(tok, ids)[:-1]) == text + "a"


def test_k63_byte_tokens_show_in_pending_at_once() -> None:
    # A stop string "\n" must be seen when its token comes, though the run of bytes may go on.
    tok = Tokenizer(llama2())
    detok = IncrementalDetokenizer(tok)
    assert detok.append(tok.encode("hell")) == "hell"
    assert detok.append([tok._backend.token_to_id("<0x0A>")]) == ""
    assert detok.pending() == "\n"
    assert detok.append([tok._backend.token_to_id("a")]) == "\na"


@pytest.mark.parametrize("make", [byte_level, llama2], ids=["byte_level", "llama2"])
def test_k63_max_tokens_cuts_an_emoji(make: Callable[[], Backend]) -> None:
    tok = Tokenizer(make())
    data = "a😀".encode()
    if make is byte_level:
        ids = byte_ids(tok._backend, data)
    else:
        ids = [tok._backend.token_to_id(t) for t in ["a", *(f"<0x{b:02X}>" for b in data[1:])]]
    for cut in (1, 2, 3):  # bytes of the emoji that came through
        pieces = stream(tok, ids[: 1 + cut])
        assert pieces[0] == "a" and not any(pieces[1:-1])
        assert set(pieces[-1]) == {"\ufffd"}


@pytest.mark.parametrize("seed", range(200))
def test_k63_random_bytes(seed: int) -> None:
    rng = random.Random(seed)
    tok = Tokenizer(byte_level())
    if seed % 2:
        data = bytes(rng.choice([*b"a\xc3\xa9\xed\xa0\xf0\x9f\x98\x80", 0xFF]) for _ in range(40))
    else:
        data = rng.randbytes(rng.randint(1, 40))
    ids = byte_ids(tok._backend, data)
    assert tok.decode(ids) == data.decode("utf-8", "replace")
    pieces = stream(tok, ids, chunk=rng.randint(1, 3))
    # Until flush() a U+FFFD stands only where it stays whatever comes next.
    before = "".join(pieces[:-1])
    assert tok.decode(ids + byte_ids(tok._backend, b"\x80a")).startswith(before)
    assert tok.decode(ids + byte_ids(tok._backend, b"a")).startswith(before)


@pytest.mark.parametrize("seed", range(50))
def test_k63_random_byte_fallback_runs(seed: int) -> None:
    rng = random.Random(seed)
    tok = Tokenizer(llama2())
    ids = []
    while len(ids) < 30:
        bad = rng.random() < 0.3
        run = rng.randbytes(2) if bad else rng.choice(["\n", "世", "😀", "éa"]).encode()
        ids += [tok._backend.token_to_id(f"<0x{b:02X}>") for b in run]
        if rng.random() < 0.5:
            ids.append(rng.choice([1, 2, 259, 260, 400, tok._backend.token_to_id("▁the")]))
    stream(tok, ids, skip=bool(seed % 2), chunk=rng.randint(1, 3))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ALL_BACKENDS)
def test_k63_random_ids_of_every_decoder(name: str, skip: bool) -> None:
    # Whole vocabulary, special tokens and unknown ids in any order: starts included.
    rng = random.Random(7)
    tok = Tokenizer(ALL_BACKENDS[name]())
    for _ in range(200):
        ids = [rng.randrange(tok.vocab_size + 3) for _ in range(rng.randint(1, 8))]
        stream(tok, ids, skip=skip)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "metaspace", "no_decoder", "wordpiece"])
def test_common_decoders_stream(name: str) -> None:
    # No silent fall into the "nothing is final before the end" rule.
    tok = Tokenizer(ALL_BACKENDS[name]())
    assert tok.decode_rules.kind == ("bytes" if name == "byte_level" else "pieces")


def test_llama2_leading_blanks() -> None:
    tok = Tokenizer(llama2())
    backend = tok._backend
    blank, a, bos = (backend.token_to_id(t) for t in ("▁", "▁a", "<s>"))
    assert stream(tok, [bos, a, a]) == ["", "a", " a", ""]
    assert stream(tok, [blank, blank, a]) == ["", " ", " a", ""]
    assert stream(tok, [bos, a, bos, a]) == ["", "a", "", " a", ""]
    assert "".join(stream(tok, tok.encode("hello the a"))) == "hello the a"


@pytest.mark.parametrize("make", [byte_level, llama2], ids=["byte_level", "llama2"])
def test_special_tokens_in_the_middle(make: Callable[[], Backend]) -> None:
    tok = Tokenizer(make())
    name = "<|im_end|>" if make is byte_level else "</s>"
    special = tok._backend.token_to_id(name)
    ids = [*tok.encode("hell", add_special_tokens=False), special]
    ids += tok.encode("a", add_special_tokens=False)
    assert name not in "".join(stream(tok, ids, skip=True))
    assert name in "".join(stream(tok, ids, skip=False))


def test_skipped_token_inside_a_character() -> None:
    for tok, ids in _split_characters():
        assert "".join(stream(tok, ids)) == "世"
        assert "\ufffd" in "".join(stream(tok, ids, skip=False))


def _split_characters() -> list[tuple[Tokenizer, list[int]]]:
    first, second = Tokenizer(byte_level()), Tokenizer(llama2())
    special = first._backend.token_to_id("<|im_end|>")
    one, two, three = byte_ids(first._backend, "世".encode())
    b = [second._backend.token_to_id(f"<0x{x:02X}>") for x in "世".encode()]
    return [(first, [one, special, two, three]), (second, [b[0], 2, b[1], b[2]])]


@pytest.mark.parametrize("name", ALL_BACKENDS)
def test_k61_unknown_ids_add_nothing(name: str) -> None:
    tok = Tokenizer(ALL_BACKENDS[name]())
    good = [1, 2, 3]
    bad = [tok.vocab_size, 10**6, 2**31, 2**32 - 1, 2**32, 2**64, -1]
    assert "".join(stream(tok, [bad[0], *good, *bad])) == tok.decode(good)
    assert stream(tok, bad) == [""] * 8


def test_k61_added_tokens_above_the_base_vocabulary() -> None:
    for backend in (byte_level(), llama2()):
        texts = ["<tool>", "世界", "größer Ġ"]
        backend.add_tokens([AddedToken(t, normalized=False) for t in texts])
        tok = Tokenizer(backend)
        added = [backend.token_to_id(t) for t in texts]
        assert min(added) >= tok._backend.get_vocab_size(with_added_tokens=False)
        start = tok.encode("a", add_special_tokens=False)
        pieces = stream(tok, start + added)
        assert pieces[-4:-2] == ["<tool>", "世界"]


def test_chunks_of_any_size() -> None:
    tok = Tokenizer(byte_level())
    ids = tok.encode("hello 世界 😀 hell a" * 3)
    for chunk in (1, 2, 5, len(ids)):
        assert "".join(stream(tok, ids, chunk=chunk)) == "hello 世界 😀 hell a" * 3
    assert stream(tok, []) == [""]
    assert IncrementalDetokenizer(tok).append([]) == ""


def test_streams_do_not_share_state() -> None:
    tok = Tokenizer(byte_level())
    ids = byte_ids(tok._backend, "世".encode())
    one, two = IncrementalDetokenizer(tok), IncrementalDetokenizer(tok)
    one.append(ids[:2])
    assert two.append(ids) == "世"
    assert one.append(ids[2:]) == "世"


def test_append_after_flush() -> None:
    detok = IncrementalDetokenizer(Tokenizer(byte_level()))
    detok.flush()
    with pytest.raises(ValueError, match="after flush"):
        detok.append([1])


@pytest.mark.parametrize("name", ["byte_level", "llama2", "wordpiece"])
def test_work_per_token_is_constant(name: str) -> None:
    # Counted, not timed: the ids handed to decode() do not grow with the history.
    backend = ALL_BACKENDS[name]()

    class Counting:
        longest = 0

        def __getattr__(self, attribute: str) -> object:
            return getattr(backend, attribute)

        def decode(self, ids: list[int], **options: object) -> str:
            Counting.longest = max(Counting.longest, len(ids))
            return backend.decode(ids, **options)

    tok = Tokenizer(Counting())  # type: ignore[arg-type]
    rng = random.Random(0)
    lowest = 259 if name == "llama2" else 0  # a run of byte tokens is decoded together, once
    detok = IncrementalDetokenizer(tok)
    for _ in range(500):
        detok.append([rng.randrange(lowest, backend.get_vocab_size())])
    assert len(detok.text) > 400
    assert Counting.longest <= 4
