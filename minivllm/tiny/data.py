"""From stories and answers to token streams: which documents exist, and how they are encoded.

Owns the document kinds ("streams"), the train and held-out split, and the .npz file the training
reads. Trains nothing. An id carries a flag in bit 15 where no loss is taken: a user's words, the
token after an unfinished story. So tokens and loss mask travel in the same two bytes.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from minivllm.tiny import filters, grammar

HERE = Path(__file__).parent
ANSWERS_FILE = HERE / "answers.jsonl"
EVAL_FILE = HERE / "eval_questions.jsonl"
SYSTEM_FILE = HERE / "system_lines.txt"
NO_LOSS = 0x8000
IDS = 0x7FFF
EOT, IM_START, IM_END, PAD = 0, 1, 2, 3
HELD_OUT = ("complete_raw", "told_raw", "incomplete_raw")
PREFIXES = ("Please tell me, ", "Tell me, ", "I have a question. ", "Hello! ", "Can you help me? ")

Turn = tuple[str, str]


def read_jsonl(path: str | Path) -> list[dict]:
    """All objects of a .jsonl or .jsonl.xz file."""
    opener = lzma.open if str(path).endswith(".xz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def read_stories(directory: str | Path) -> list[dict]:
    """The generated stories (not the teacher's answers) of every part in `directory`."""
    parts = sorted(Path(directory).glob("*.jsonl*"))
    if not parts:
        raise ValueError(f"no .jsonl or .jsonl.xz part in {directory}")
    return [d for part in parts for d in read_jsonl(part) if d["kind"] == "story"]


def is_held_out(text: str) -> bool:
    """One text in a hundred, by its hash, so that the split needs no list and never changes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100 == 0


def told_stories(count: int, seed: int) -> Iterator[grammar.Story]:
    """`count` stories told directly by the grammar, all plots in turn."""
    plots, rng = grammar.read_plots(), random.Random(seed)
    for i in range(count):
        yield grammar.draw_story(plots[i % len(plots)], rng)


def normalise(question: str) -> str:
    """A question without case and punctuation, to compare wordings."""
    return re.sub(r"[^a-z0-9+ -]", "", question.lower()).strip()


def vary(question: str, rng: random.Random, banned: frozenset[str] = frozenset()) -> str:
    """A child's way to type: a prefix, "which" for "what", a lost word or mark, all lower case.

    Never one of the `banned` wordings (normalised), which are kept for the evaluation.
    """
    varied = question
    if rng.random() < 0.15:
        varied = re.sub(r"^(Which|What)(?= \w+ (?:do|does|is|can)\b)", _other_word, varied)
    if rng.random() < 0.07:
        # A lost article or helper verb teaches to look at the words that matter.
        varied = re.sub(r" (?:a|an|the|do|does|is)(?= )", "", varied, count=1)
    if rng.random() < 0.3:
        prefix = rng.choice(PREFIXES)
        lower = not varied.startswith(("I ", "It ")) and prefix.endswith(", ")
        varied = prefix + (varied[0].lower() + varied[1:] if lower else varied)
    if rng.random() < 0.12:
        varied = varied.rstrip("?.!")
    varied = varied.lower() if rng.random() < 0.12 else varied
    return question if normalise(varied) in banned else varied


def _other_word(match: re.Match) -> str:
    return "What" if match[0] == "Which" else "Which"


def system_message(lines: Sequence[str], rng: random.Random) -> str:
    """One line, or a long instruction of up to 25 lines (about 300 tokens)."""
    count = 1 if rng.random() < 0.5 else rng.randrange(2, 26)
    return " ".join(rng.sample(list(lines), count))


class Encoder:
    """Turns texts and chats into arrays of flagged ids with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """Plain ids of `text`, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def raw(self, text: str, ends: bool) -> np.ndarray:
        """A story as it stands; its end token is learned only where the story is complete."""
        tail = [EOT] if ends else [PAD | NO_LOSS]
        return np.array(self.ids(text) + tail, dtype=np.uint16)

    def chat(self, turns: Sequence[Turn], system: str | None, ends: bool = True) -> np.ndarray:
        """A ChatML conversation; loss falls only on the assistant's words and their end."""
        out: list[int] = []
        messages = [("system", system)] if system else []
        for question, answer in turns:
            messages += [("user", question), ("assistant", answer)]
        newline = self.ids("\n")
        for role, content in messages:
            head = [IM_START, *self.ids(role), *newline]
            body = [*self.ids(content), IM_END]
            out += [i | NO_LOSS for i in head]
            out += body if role == "assistant" else [i | NO_LOSS for i in body]
            out += [i | NO_LOSS for i in newline]
        if not ends:
            # Take back the end token of the last answer: the story was cut, it does not stop here.
            out = out[: -1 - len(newline)]
        return np.array([*out, EOT | NO_LOSS], dtype=np.uint16)


def answer_chats(entries: Sequence[dict], passes: int, seed: int) -> Iterator[list[Turn]]:
    """Every wording of every question `passes` times, one in four inside a longer conversation."""
    rng = random.Random(seed)
    banned = frozenset(normalise(entry["question"]) for entry in read_jsonl(EVAL_FILE))
    singles = [(q, e["answer"]) for e in entries for q in [e["question"], *e["variants"]]]
    for _ in range(passes):
        rng.shuffle(singles)
        i = 0
        while i < len(singles):
            turns = 1 if rng.random() < 0.75 else rng.randrange(2, 5)
            yield [(vary(q, rng, banned), a) for q, a in singles[i : i + turns]]
            i += turns


class Streams:
    """Collects documents by stream; drops held-out texts of streams without a held-out part."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.encoder, self.rng = Encoder(tokenizer), random.Random(seed)
        self.lines = [x for x in SYSTEM_FILE.read_text("utf-8").splitlines() if x]
        self.documents: dict[str, list[np.ndarray]] = {}

    def system(self) -> str | None:
        """A system message for about one conversation in seven."""
        return system_message(self.lines, self.rng) if self.rng.random() < 0.15 else None

    def add(self, name: str, document: np.ndarray, held: bool = False) -> None:
        """Append to the stream `name`, or to 'held_' + name."""
        if not held:
            self.documents.setdefault(name, []).append(document)
        elif name in HELD_OUT:
            self.documents.setdefault("held_" + name, []).append(document)

    def add_written(self, story: dict) -> None:
        """A story of the teacher: raw, as a chat, and once more where it holds together."""
        text, held = story["text"], is_held_out(story["text"])
        if not story["complete"]:
            self.add("incomplete_raw", self.encoder.raw(text, ends=False), held)
            return
        raw = self.encoder.raw(text, ends=True)
        chat = self.encoder.chat([(story["prompt"], text)], self.system())
        self.add("complete_raw", raw, held)
        self.add("complete_chat", chat, held)
        if filters.holds_together(text, story["prompt"]):
            self.add("good_raw", raw, held)
            self.add("good_chat", chat, held)

    def add_told(self, drawn: grammar.Story, held: bool) -> None:
        """A story of the grammar; a third of the chats ask for a hero with a name never seen."""
        self.add("told_raw", self.encoder.raw(drawn.told, ends=True), held)
        if self.rng.random() < 0.35:
            drawn = grammar.rename_hero(drawn, grammar.invented_name(self.rng))
        chat = self.encoder.chat([(drawn.request, drawn.told)], self.system())
        self.add("told_chat", chat, held)


def build(
    stories: Sequence[dict], tokenizer: Tokenizer, told: int, passes: int, seed: int
) -> dict[str, list[np.ndarray]]:
    """All streams: name -> flagged id arrays. Held-out streams are named 'held_' + name."""
    streams = Streams(tokenizer, seed)
    for story in stories:
        streams.add_written(story)
    for i, drawn in enumerate(told_stories(told, seed)):
        streams.add_told(drawn, held=i % 200 == 0)
    for turns in answer_chats(read_jsonl(ANSWERS_FILE), passes, seed):
        streams.add("answers", streams.encoder.chat(turns, streams.system()))
    return streams.documents


def corpus(stories: Iterable[dict], told: int, seed: int) -> Iterator[str]:
    """Texts the tokenizer is trained on: everything that is learned to be written."""
    for story in stories:
        if not is_held_out(story["text"]):
            yield story["text"]
    for drawn in told_stories(told, seed):
        yield drawn.told
        yield drawn.request
    for entry in read_jsonl(ANSWERS_FILE):
        # The answers are few but learned by heart, so their words should be whole tokens.
        for _ in range(20):
            yield from (entry["question"], *entry["variants"], entry["answer"])
    yield from SYSTEM_FILE.read_text("utf-8").splitlines()


def save_streams(streams: dict[str, list[np.ndarray]], path: str | Path) -> dict[str, dict]:
    """Write flat ids and document lengths of every stream; return documents and tokens of each."""
    arrays, counts = {}, {}
    for name, documents in streams.items():
        arrays[name + ".ids"] = np.concatenate(documents)
        arrays[name + ".lengths"] = np.array([len(d) for d in documents], dtype=np.uint16)
        counts[name] = {"documents": len(documents), "tokens": int(arrays[name + ".ids"].size)}
    np.savez_compressed(path, **arrays)
    return counts


def load_streams(path: str | Path) -> dict[str, list[np.ndarray]]:
    """The inverse of `save_streams`."""
    with np.load(path) as file:
        return {
            key[:-4]: np.split(
                file[key], np.cumsum(file[key[:-4] + ".lengths"].astype(np.int64))[:-1]
            )
            for key in file.files
            if key.endswith(".ids")
        }
