"""From ids to text: stop strings, streaming deltas, log-probability entries, metrics."""

from __future__ import annotations

import random

import pytest

from minivllm.engine.output_processor import RequestState
from minivllm.engine.sequence import Sequence, Status
from minivllm.engine.step_plan import TokenLogprobs
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import Tokenizer

SPECIAL = 257  # <|im_end|> of the test tokenizer


def make(tokenizer: Tokenizer | None, n: int = 1, **fields) -> RequestState:
    params = SamplingParams(n=n, max_tokens=100, **fields)
    seqs = [Sequence(i, [1, 2, 3], params, sample_index=i) for i in range(n)]
    return RequestState("r", "text", [1, 2, 3], seqs, tokenizer)


def feed(
    state: RequestState, token: int, end: str | None = None, sample: int = 0, logprobs=None
) -> str | None:
    """One token as the engine gives it; `end` is the reason for which it is the last."""
    seq = state.samples[sample].seq
    seq.token_ids.append(token)
    if end is not None:
        seq.status, seq.finish_reason = Status.FINISHED, end
    return state.add_token(seq, logprobs)


def feed_text(state: RequestState, tokenizer: Tokenizer, text: str) -> str | None:
    for token in tokenizer.encode(text):
        stop = feed(state, token)
        if stop is not None:
            return stop
    return None


def text_of(state: RequestState) -> str:
    return state.output().outputs[0].text


# -- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "cut", "reason"),
    [
        ("hello world", ["o w"], "hell", "o w"),
        ("hello world", ["x"], "hello world", None),
        ("hello", ["h"], "", "h"),
        ("aab", ["ab"], "a", "ab"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("one two", ["two", "one"], "", "one"),
        ("abc", ["bc", "c"], "a", "bc"),  # both end here: the one that begins first
        ("abc", ["c", "bc"], "a", "bc"),
        ("grün und", ["ün"], "gr", "ün"),
        ("a\nb", ["\n"], "a", "\n"),
        ("日本語", ["本"], "日", "本"),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, text: str, stop: list[str], cut: str, reason: str | None
) -> None:
    state = make(tokenizer, stop=stop)
    assert feed_text(state, tokenizer, text) == reason
    assert text_of(state) == cut
    whole = make(tokenizer, stop=stop, include_stop_str_in_output=True)
    feed_text(whole, tokenizer, text)
    assert text_of(whole) == cut + (reason or "")


def test_nothing_is_added_behind_a_stop_string(tokenizer: Tokenizer) -> None:
    state = make(tokenizer, stop=["b"])
    assert feed_text(state, tokenizer, "ab") == "b"
    assert feed_text(state, tokenizer, "cab") is None and text_of(state) == "a"


def test_a_stop_string_in_the_text_of_an_ending_token(tokenizer: Tokenizer) -> None:
    """The last token by length completes it: that is the reason to report."""
    state = make(tokenizer, stop=["b"])
    feed_text(state, tokenizer, "a")
    assert feed(state, tokenizer.encode("b")[0], end="length") == "b"
    assert text_of(state) == "a"


def test_an_ending_id_adds_no_text(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("b")
    for include, text in ((False, "a"), (True, "ab")):
        state = make(tokenizer, include_stop_str_in_output=include)
        feed_text(state, tokenizer, "a")
        assert feed(state, letter, end="stop") is None
        assert text_of(state) == text


def test_a_stop_string_may_not_end_by_id_first(tokenizer: Tokenizer) -> None:
    """An id that ends the sequence adds no text, so no stop string can be in it."""
    state = make(tokenizer, stop=["ab"])
    feed_text(state, tokenizer, "a")
    assert feed(state, tokenizer.encode("b")[0], end="stop") is None
    assert text_of(state) == "a"


# -- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    """Whatever is asked for in between: ids, text and log-probabilities, each exactly once."""
    rng = random.Random(seed)
    stop = rng.choice(([], ["ab"], ["abcd", "b"]))
    skip = rng.random() < 0.5
    state = make(tokenizer, stop=stop, logprobs=0, skip_special_tokens=skip)
    text, ids, entries = "", [], 0
    count = rng.randrange(1, 30)
    for number in range(count):
        token = rng.choice((64, 65, 66, 67, 190, 128, SPECIAL, rng.randrange(256)))
        last = number == count - 1
        logprobs = TokenLogprobs(token, -0.5, 1, [], [])
        found = feed(state, token, "length" if last else None, logprobs=logprobs)
        if found is not None:
            state.samples[0].seq.status = Status.FINISHED
        if last or found is not None or rng.random() < 0.6:
            (piece,) = state.output(delta=True).outputs
            text += piece.text
            ids += piece.token_ids
            entries += len(piece.logprobs)
        if found is not None:
            break
    (whole,) = state.output().outputs
    assert text == whole.text and ids == whole.token_ids and entries == len(whole.logprobs)
    decoded = tokenizer.decode(whole.token_ids, skip)
    assert decoded.startswith(whole.text) if found else decoded == whole.text


def test_what_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    state = make(tokenizer, stop=["abcd"])
    shown = []
    for letter in "xyzabcz":
        feed_text(state, tokenizer, letter)
        shown.append(state.samples[0].take_new_text())
    assert "".join(shown) == "xyza" and shown[:4] == ["", "", "", "x"]
    feed(state, tokenizer.encode("!")[0], end="length")
    assert state.samples[0].take_new_text() == "bcz!"


def test_no_character_is_split(tokenizer: Tokenizer) -> None:
    state = make(tokenizer)
    pieces = []
    for token in tokenizer.encode("é日"):
        feed(state, token)
        pieces.append(state.output(delta=True).outputs[0].text)
    assert pieces == ["", "é", "", "", "日"]


def test_without_text(tokenizer: Tokenizer) -> None:
    for state in (make(None), make(tokenizer, detokenize=False)):
        feed(state, 70)
        assert text_of(state) == "" and state.output().outputs[0].token_ids == [70]
        assert feed(state, 70, end="length") is None


# -- outputs --------------------------------------------------------------------------------------


def test_an_output_does_not_grow_afterwards(tokenizer: Tokenizer) -> None:
    state = make(tokenizer, logprobs=0)
    entry = TokenLogprobs(70, -1.0, 1, [], [])
    feed(state, 70, logprobs=entry)
    early = state.output().outputs[0]
    feed(state, 70, logprobs=entry)
    assert len(early.token_ids) == len(early.logprobs) == 1
    assert len(state.output().outputs[0].logprobs) == 2


def test_logprob_entries(tokenizer: Tokenizer) -> None:
    """The token itself first, then the most likely ones; once where it is among them."""
    state = make(tokenizer, logprobs=2)
    feed(state, 70, logprobs=TokenLogprobs(70, -3.0, 9, [66, 67], [-1.0, -2.0]))
    feed(state, 66, logprobs=TokenLogprobs(66, -1.0, 1, [66, 67], [-1.0, -2.0]))
    sample = state.output().outputs[0]
    first, second = sample.logprobs
    assert list(first) == [70, 66, 67] and list(second) == [66, 67]
    assert [entry.rank for entry in first.values()] == [9, 1, 2]
    assert [entry.logprob for entry in first.values()] == [-3.0, -1.0, -2.0]
    assert first[66].decoded_token == tokenizer.decode([66])
    assert sample.cumulative_logprob == -4.0


def test_prompt_logprobs_may_come_twice(tokenizer: Tokenizer) -> None:
    """A preempted prompt is computed again: entries are set by position, not appended."""
    state = make(tokenizer, prompt_logprobs=0)
    state.add_prompt_logprobs(0, [TokenLogprobs(2, -1.0, 1, [], [])])
    state.add_prompt_logprobs(0, [TokenLogprobs(2, -1.0, 1, [], [])])
    state.add_prompt_logprobs(1, [TokenLogprobs(3, -2.0, 4, [], [])])
    first, *rest = state.output().prompt_logprobs
    assert first is None and [list(entry) for entry in rest] == [[2], [3]]
    assert make(tokenizer).output().prompt_logprobs is None


def test_samples_end_one_by_one(tokenizer: Tokenizer) -> None:
    state = make(tokenizer, n=2)
    feed(state, 70, end="length", sample=1)
    assert not state.finished and state.output().outputs[1].finish_reason == "length"
    feed(state, 71, end="stop", sample=0)
    assert state.finished and state.output().finished
    assert [sample.index for sample in state.output().outputs] == [0, 1]


def test_time_to_first_token(tokenizer: Tokenizer) -> None:
    state = make(tokenizer)
    assert state.metrics.time_to_first_token is None
    feed(state, 70)
    first = state.metrics.first_token_time
    feed(state, 70)
    assert state.metrics.first_token_time == first
    assert state.metrics.time_to_first_token >= 0
