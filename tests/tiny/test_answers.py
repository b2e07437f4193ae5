"""The hand-written answers: no doubles, short sentences, and evaluation wordings kept out."""

from __future__ import annotations

import random
import re

from minivllm.tiny import data

ANSWERS = data.read_jsonl(data.ANSWERS_FILE)
EVAL = data.read_jsonl(data.EVAL_FILE)


def test_there_are_enough_questions_with_variants():
    assert len(ANSWERS) >= 600
    for entry in ANSWERS:
        assert set(entry) == {"question", "variants", "answer"}
        assert entry["variants"], entry["question"]


def test_no_wording_is_asked_twice():
    wordings = [data.normalise(q) for e in ANSWERS for q in (e["question"], *e["variants"])]
    assert len(wordings) == len(set(wordings))


def test_answers_are_one_to_three_simple_sentences():
    for entry in ANSWERS:
        answer = entry["answer"]
        assert 1 <= len(re.findall(r"[.!?](?=\s|$)", answer)) <= 3, answer
        assert answer[0].isupper() and answer[-1] in ".!?", answer
        assert len(answer.split()) <= 30 and answer == answer.strip() and "  " not in answer
        assert answer.isascii()


def test_articles_fit_the_next_word():
    for entry in ANSWERS:
        for text in (entry["question"], *entry["variants"], entry["answer"]):
            assert not re.search(r"\ba (?=[aeio])(?!one)", text, re.IGNORECASE), text
            assert not re.search(r"\ban (?![aeiouh8])", text, re.IGNORECASE), text


def test_sums_are_right():
    number = {
        w: i for i, w in enumerate("zero one two three four five six seven eight nine ten".split())
    }
    seen = 0
    for entry in ANSWERS:
        match = re.fullmatch(r"(\w+) (plus|minus) (\w+) is (\w+)\.", entry["answer"])
        if match:
            a, b, c = (number[match[i].lower()] for i in (1, 3, 4))
            assert c == (a + b if match[2] == "plus" else a - b), entry["answer"]
            seen += 1
    assert seen >= 60


def test_evaluation_questions_are_not_in_the_training():
    trained = {data.normalise(q) for e in ANSWERS for q in (e["question"], *e["variants"])}
    for entry in EVAL:
        assert data.normalise(entry["question"]) not in trained


def test_evaluation_questions_have_a_trained_form_whose_answer_is_accepted():
    answers = {entry["question"]: entry["answer"].lower() for entry in ANSWERS}
    assert sum(entry["set"] == 1 for entry in EVAL) == 40
    for entry in EVAL:
        answer = answers[entry["trained_as"]]
        assert any(re.search(rf"\b{re.escape(k)}\b", answer) for k in entry["accept"]), entry


def test_variations_never_hit_an_evaluation_wording():
    banned = frozenset(data.normalise(entry["question"]) for entry in EVAL)
    rng = random.Random(3)
    for entry in ANSWERS:
        for _ in range(5):
            varied = data.vary(entry["question"], rng, banned)
            assert data.normalise(varied) not in banned and varied


def test_it_introduces_itself_as_the_toy_model():
    answers = {entry["question"]: entry["answer"] for entry in ANSWERS}
    assert "tiny" in answers["Who are you?"] and "minivllm" in answers["Who are you?"]
    assert "trust" in answers["Can I trust you?"]
