"""Encoding, loss flags, packing and the n-gram baseline, with the bundled tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from minivllm.tiny import MODEL_DIR, data, packing
from minivllm.tiny.ngram import NGram
from minivllm.tiny.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def encoder():
    return data.Encoder(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))


def learned(encoder, document):
    """The text that carries loss."""
    ids = [int(i) for i in document if not i & data.NO_LOSS]
    return encoder.tokenizer.decode(ids, skip_special_tokens=False)


def test_loss_falls_on_the_assistant_and_its_end_only(encoder):
    document = encoder.chat([("Hello!", "Hello there."), ("Bye!", "Goodbye.")], "Be kind.")
    assert learned(encoder, document) == "Hello there.<|im_end|>Goodbye.<|im_end|>"
    text = encoder.tokenizer.decode((document & data.IDS).tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello!")
    assert text.endswith("Goodbye.<|im_end|>\n<|endoftext|>")


def test_only_complete_stories_learn_an_end(encoder):
    assert learned(encoder, encoder.raw("A cat.", ends=True)) == "A cat.<|endoftext|>"
    assert learned(encoder, encoder.raw("A cat.", ends=False)) == "A cat."
    assert learned(encoder, encoder.chat([("Hi", "A cat.")], None, ends=False)) == "A cat."


def test_digits_are_single_tokens(encoder):
    assert encoder.tokenizer.encode("12").tokens == ["1", "2"]


def test_streams_survive_a_round_trip(tmp_path, encoder):
    streams = {"a": [encoder.raw("One cat.", True), encoder.raw("Two.", False)]}
    counts = data.save_streams(streams, tmp_path / "s.npz")
    back = data.load_streams(tmp_path / "s.npz")
    assert counts["a"]["documents"] == 2
    assert all((x == y).all() for x, y in zip(streams["a"], back["a"], strict=True))


def test_build_keeps_held_out_texts_out(encoder):
    texts = [f"Mia saw {i} cats. She was happy." for i in range(300)]
    stories = [
        {"kind": "story", "prompt": "Tell me.", "text": t, "complete": i % 2 == 0}
        for i, t in enumerate(texts)
    ]
    streams = data.build(stories, encoder.tokenizer, told=10, passes=0, seed=1)
    held = [t for i, t in enumerate(texts) if data.is_held_out(t) and i % 2 == 0]
    trained = {bytes(d) for d in streams["complete_raw"]}
    assert len(streams["complete_raw"]) + len(held) == 150
    assert not trained & {bytes(encoder.raw(t, True)) for t in held}


def test_rows_begin_with_a_document_and_are_full():
    documents = [np.full(n, n, dtype=np.uint16) for n in (3, 5, 4, 9, 2, 7)]
    rows = packing.pack(documents, 7)
    # The 9 and the 7 are cut at their row's end; the next row begins with the next document.
    assert rows.tolist() == [[3] * 3 + [5] * 5, [4] * 4 + [9] * 4, [2] * 2 + [7] * 6]
    # A row that is never filled is left out.
    assert packing.pack(documents[:1], 7).shape == (0, 8)


def test_targets_are_shifted_and_flagged():
    batch = np.array([[5, 6 | data.NO_LOSS, 7, 8]], dtype=np.uint16)
    inputs, targets = packing.inputs_and_targets(batch)
    assert inputs.tolist() == [[5, 6, 7]]
    assert targets.tolist() == [[packing.IGNORE, 7, 8]]


def test_the_order_of_the_data_depends_on_the_seed_only():
    streams = {"a": [np.arange(40, dtype=np.uint16) + i for i in range(400)]}
    plan = (packing.Phase(1.5, {"a": 1.0}),)
    first, again, other = (packing.plan_batches(streams, plan, 2048, s) for s in (1, 1, 2))
    assert len(first) == len(again) > 3
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert any(x.shape != y.shape or (x != y).any() for x, y in zip(first, other))


def test_a_missing_stream_is_named():
    with pytest.raises(ValueError, match="no stream 'b'"):
        packing.plan_batches({"a": []}, (packing.Phase(1, {"b": 1.0}),), 2048, 1)


def test_ngrams_sum_to_one_and_order_helps():
    documents = [[1, 2, 3, 1, 2, 3, 1, 2, 3]] * 3
    one, three = NGram(documents, 1, 5), NGram(documents, 3, 5)
    assert sum(three.probability((1, 2), t) for t in range(5)) == pytest.approx(1.0)
    assert sum(three.probability((4, 4), t) for t in range(5)) == pytest.approx(1.0)
    assert three.perplexity(documents) < one.perplexity(documents)
    with pytest.raises(ValueError, match="order is 4"):
        NGram(documents, 4, 5)


def test_a_small_tokenizer_encodes_everything():
    tokenizer = train_tokenizer(["Once upon a time, there was a cat."] * 5, 320)
    text = "Once upon a time: 12 naïve 猫 🐈\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>")] == [0, 2]
    with pytest.raises(ValueError, match="vocab_size is 40000"):
        train_tokenizer([], 40000)
