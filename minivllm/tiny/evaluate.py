"""Judges a trained model: perplexity beside n-grams, seeded samples, answers and greedy margins.

Runs transformers in fp32 on the CPU, one sample at a time with its own seed, so that a report can
be made again on any machine. Owns no training and changes no weights. Reading the samples stays a
person's work: how many of them hold together is not something this module can count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen3ForCausalLM

from minivllm.tiny import data, filters
from minivllm.tiny.ngram import NGram

PROMPT = "Once upon a time"
MAX_NEW_TOKENS = 300
TOP_P = 0.95
MARGIN_PROMPTS = (
    "Once upon a time",
    "One day, a little cat",
    "There was a girl named Lily.",
    "Ben and his dog went to the lake.",
    "It was a cold winter day.",
    "The sun was shining and",
)
# The last four names are in no list of the grammar.
REQUESTED = (
    ("dog", "Max"),
    ("cat", "Luna"),
    ("girl", "Emma"),
    ("boy", "Tom"),
    ("bear", "Teddy"),
    ("rabbit", "Clara"),
    ("duck", "George"),
    ("mouse", "Pepper"),
    ("girl", "Priya"),
    ("boy", "Mateo"),
    ("cat", "Whiskers"),
    ("dog", "Bruno"),
)


class Judge:
    """A model and its tokenizer on the CPU in fp32."""

    def __init__(self, model: str | Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.ends = [
            self.tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>")
        ]

    @torch.inference_mode()
    def generate(
        self, prompt: str, temperature: float = 0.0, seed: int = 0
    ) -> tuple[str, bool, list[float]]:
        """(text, ended by itself, top-2 logit margins); greedy at temperature 0.

        The margin of a step is the best raw logit minus the second best.
        """
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        torch.manual_seed(seed)
        options: dict = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_p": TOP_P, "top_k": 0}
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=self.ends,
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        new = out.sequences[0, ids.shape[1] :].tolist()
        tops = [logits[0].topk(2).values for logits in out.logits]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return text, new[-1] in self.ends, [float(top[0] - top[1]) for top in tops]

    def chat(self, question: str, system: str | None = None) -> tuple[str, bool, list[float]]:
        """The greedy answer to one question, with or without a system message."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question})
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.generate(prompt)

    @torch.inference_mode()
    def perplexity(self, documents: Sequence[np.ndarray]) -> float:
        """exp of the mean loss a token, each document alone, its first token left out."""
        nats, count = 0.0, 0
        for document in documents:
            ids = torch.from_numpy((document & data.IDS).astype(np.int64))[None]
            scores = self.model(ids).logits[0, :-1].log_softmax(-1)
            picked = scores.gather(1, ids[0, 1:, None])[:, 0]
            learned = torch.from_numpy((document[1:] & data.NO_LOSS) == 0)
            nats -= float(picked[learned].sum())
            count += int(learned.sum())
        return math.exp(nats / count)


def accepted(answer: str, entry: dict) -> bool:
    """Whether an answer holds an accepted phrase as whole words, and none of the rejected."""

    def holds(phrase: str) -> bool:
        return re.search(rf"\b{re.escape(phrase.lower())}\b", answer.lower()) is not None

    return any(map(holds, entry["accept"])) and not any(map(holds, entry.get("reject", ())))


def ask(judge: Judge, entries: Sequence[dict], system: str | None = None) -> dict:
    """Greedy answers to the evaluation questions, and how many are right and how many end."""
    rows = []
    for entry in tqdm(entries, desc="questions", mininterval=5.0):
        text, ended, _ = judge.chat(entry["question"], system)
        rows.append(
            {
                "set": entry["set"],
                "question": entry["question"],
                "answer": text,
                "right": accepted(text, entry),
                "ended": ended,
            }
        )
    sets = {n: [row["right"] for row in rows if row["set"] == n] for n in (1, 2)}
    return {
        "asked": len(rows),
        "right": sum(row["right"] for row in rows),
        "right_by_set": {n: f"{sum(right)} of {len(right)}" for n, right in sets.items()},
        "ended": sum(row["ended"] for row in rows),
        "answers": rows,
    }


def sample(judge: Judge, count: int, temperature: float, seed: int) -> dict:
    """`count` continuations of "Once upon a time" with seeds seed, seed + 1, ..."""
    rows = []
    for i in tqdm(range(seed, seed + count), desc="samples", mininterval=5.0):
        text, ended, _ = judge.generate(PROMPT, temperature, i)
        rows.append({"seed": i, "text": PROMPT + text, "ended": ended})
    texts = [row["text"] for row in rows]
    return {
        "temperature": temperature,
        "top_p": TOP_P,
        "count": count,
        "ended": sum(row["ended"] for row in rows),
        "words": sum(len(filters.words(t)) for t in texts) / count,
        "distinct": {
            n: round(sum(filters.distinct_ngrams(t, n) for t in texts) / count, 3) for n in (2, 4)
        },
        "texts": rows,
    }


def tell(judge: Judge) -> dict:
    """Greedy stories on request for every kind and name below: is the name used, does it end?"""
    rows: list[dict[str, Any]] = []
    for kind, name in REQUESTED:
        text, ended, _ = judge.chat(f"Tell me a story about a {kind} named {name}.")
        rows.append({"kind": kind, "name": name, "text": text, "ended": ended})
    return {
        "asked": len(rows),
        "named": sum(row["name"] in row["text"] for row in rows),
        "kind_named": sum(row["kind"] in row["text"] for row in rows),
        "ended": sum(row["ended"] for row in rows),
        "texts": rows,
    }


def margins(judge: Judge) -> dict:
    """Top-2 logit margins over all greedy steps from six prompts: how safe greedy tests are."""
    values = [m for prompt in MARGIN_PROMPTS for m in judge.generate(prompt)[2]]
    low = np.quantile(values, [0.0, 0.01, 0.1, 0.5])
    return dict(
        zip(("min", "p01", "p10", "median"), (round(float(x), 4) for x in low), strict=True)
    )


def baselines(streams: dict[str, list[np.ndarray]], vocab_size: int) -> dict:
    """Perplexity of unigrams and trigrams of the complete stories on their held-out part."""
    train = [(d & data.IDS).tolist() for d in streams["complete_raw"]]
    held = [(d & data.IDS).tolist() for d in streams["held_complete_raw"]]
    names = {"unigram": 1, "trigram": 3}
    return {
        name: round(NGram(train, n, vocab_size).perplexity(held), 2) for name, n in names.items()
    }


def long_system_prompt(lines: int = 25) -> str:
    """The first lines of the system sentences: about 300 tokens that many requests can share."""
    return " ".join(data.SYSTEM_FILE.read_text("utf-8").splitlines()[:lines])


def copied(texts: Sequence[str], streams: dict[str, list[np.ndarray]], tokenizer: Any) -> dict:
    """Share of the samples' 8-grams of words that occur in training stories, and exact copies."""
    seen: set[tuple[str, ...]] = set()
    whole: set[str] = set()
    for name in ("complete_raw", "told_raw", "incomplete_raw"):
        for ids in streams[name]:
            text = tokenizer.decode((ids & data.IDS).tolist(), skip_special_tokens=True)
            tokens = filters.words(text)
            whole.add(" ".join(tokens))
            seen.update(tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7))
    grams = [tuple(w[i : i + 8]) for w in map(filters.words, texts) for i in range(len(w) - 7)]
    return {
        "eight_grams_in_training": round(sum(g in seen for g in grams) / max(1, len(grams)), 3),
        "exact_copies": sum(" ".join(filters.words(t)) in whole for t in texts),
    }


def evaluate(
    model: str | Path, streams_file: str | None, count: int, temperature: float, seed: int
) -> dict:
    """The whole report. Perplexities and copies need the streams file; the rest only the model."""
    judge = Judge(model)
    questions = data.read_jsonl(data.EVAL_FILE)
    report: dict = {"samples": sample(judge, count, temperature, seed)}
    report["questions"] = ask(judge, questions)
    system = long_system_prompt()
    report["system_prompt_tokens"] = len(judge.tokenizer(system)["input_ids"])
    report["questions_with_system_prompt"] = ask(judge, questions, system)
    report["requests"] = tell(judge)
    report["margins"] = margins(judge)
    if streams_file:
        streams = data.load_streams(streams_file)
        held = {n: d for n, d in streams.items() if n.startswith("held_")}
        report["perplexity"] = {n[5:]: round(judge.perplexity(d), 3) for n, d in held.items()}
        report["baselines"] = baselines(streams, judge.model.config.vocab_size)
        texts = [row["text"] for row in report["samples"]["texts"]]
        report["copied"] = copied(texts, streams, judge.tokenizer)
    return report
