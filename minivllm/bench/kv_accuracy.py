"""What a smaller KV cache changes: texts, best tokens and logits against the plain cache.

Owns the comparison of caches of one model on a CPU, in float32, over chat prompts. Greedy texts
alone say little: after the first different token all differs. So each cache also reads the plain
run's texts, and what it would say next is compared at every position, by the raw logits. Besides
8 bits a bfloat16 cache is measured, in the same float32 arithmetic: the yardstick. Lesson 16.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.bench.environment import stamp
from minivllm.config import ModelConfig
from minivllm.engine.input_batch import pack_rows
from minivllm.engine.step_plan import ScheduledRow
from minivllm.llm import LLM
from minivllm.ops import kv
from minivllm.sampling_params import SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Explain what a cache is to a child.",
    "Name three uses of a paper clip.",
    "What is 7 times 8? Think step by step.",
    "Translate 'good morning' into Spanish.",
    "Hi",
    "Give me a recipe for pancakes, with the quantities of flour, milk and eggs in a list.",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Which planets have rings?",
    "Tell me a short story about a dog and a key.",
    "List five animals that live in the desert.",
    "How do I boil an egg?",
    "What is the difference between weather and climate?",
    "Write a polite letter that declines an invitation to a wedding on the third of May.",
)
PROMPT_ROOM = 256  # tokens that a question takes at most, template included


@dataclass(frozen=True, slots=True)
class Text:
    """A greedy text and the logits before each of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor  # [len(tokens), V] float32


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, 99th percentile and largest of many numbers."""

    mean: float
    p99: float
    max: float

    @staticmethod
    def of(values: torch.Tensor) -> Spread:
        """values: [P] -> its spread."""
        return Spread(float(values.mean()), float(values.quantile(0.99)), float(values.max()))


@dataclass(frozen=True, slots=True)
class CacheAccuracy:
    """One cache against the plain one. Positions are those of the plain run's texts."""

    cache: str
    num_texts: int
    equal_texts: int
    common_prefix: list[int]  # tokens of each text before the first different one
    num_positions: int
    same_best: int  # positions where both caches have the same best token
    flip_margins: list[float]  # elsewhere: plain run's best logit less its second, largest first
    closer_calls: int  # positions whose margin is at most the largest of those
    logit_spread: float  # standard deviation of the plain logits over the vocabulary
    logit_error: float  # root mean square; a shift of a whole row counts as nothing
    worst_logit_error: float
    logprob_error: Spread  # |difference| of the log-probability of the text's next token
    kl: Spread  # plain distribution against the cache's, in nats

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the shares that the counts make."""
        shares = {
            "equal_share": self.equal_texts / self.num_texts,
            "mean_common_prefix": statistics.fmean(self.common_prefix),
            "same_best_share": self.same_best / self.num_positions,
            "relative_logit_error": self.logit_error / self.logit_spread,
        }
        return {**dataclasses.asdict(self), **shares}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All caches, and the texts that they read."""

    text_lengths: list[int]
    caches: list[CacheAccuracy]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "text_lengths": self.text_lengths,
            "caches": [cache.to_dict() for cache in self.caches],
            "environment": self.environment,
        }


def store_bfloat16(k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> None:
    """`ops.kv.store_kv` of numbers rounded to bfloat16. k, v: [T, Hkv, D]."""
    kv.store_kv(k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype), *rest)


CACHES: dict[str, dict[str, Any]] = {
    "bfloat16": {"parts": {"store_kv": store_bfloat16}},
    "fp8": {"kv_cache_dtype": "fp8"},
}


def compare_caches(
    path: Path,
    *,
    questions: Sequence[str] = QUESTIONS,
    tokens: int = 64,
    caches: Sequence[str] = tuple(CACHES),
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measure `caches` against the plain one, an engine after the other."""
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    limit = min(ModelConfig.from_dir(path).max_position, PROMPT_ROOM + tokens)

    def load(cache: str, **options: Any) -> LLM:
        progress(f"texts of {tokens} tokens with a {cache} cache")
        size = {"max_model_len": limit, "max_num_seqs": len(questions), "dtype": "float32"}
        return LLM(str(path), device="cpu", **size, **options)

    llm = load("plain")
    answers = greedy_texts(llm, questions, tokens)
    plain = [Text(*answer, next_logits(llm, *answer)) for answer in answers]
    del llm  # one model in memory at a time
    found = [
        accuracy(name, plain, load(name, **CACHES[name]), questions, tokens) for name in caches
    ]
    lengths = [len(text.tokens) for text in plain]
    return Comparison(lengths, found, stamp(torch.device("cpu")))


def greedy_texts(
    llm: LLM, questions: Sequence[str], tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each question, as ids; an answer ends where the model ends it."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


@torch.inference_mode()
def next_logits(llm: LLM, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Raw logits before each of `tokens`, by the engine's model and cache: [len(tokens), V].

    One prefill of prompt and text. It reads its own keys and values back from the cache, so each
    row has what a decode step would have had.
    """
    runner: Any = llm.engine.runner
    ids = [*prompt, *tokens[:-1]]
    blocks = list(range(-(-len(ids) // runner.block_size)))
    # Below zero: no sequence of the engine has this id.
    row = ScheduledRow(-1, 0, 0, len(ids), ids, blocks, None)
    inputs = pack_rows([row], runner.block_size).to(runner.device)
    hidden = runner.model(inputs.ids, inputs.batch, runner.kv_cache, runner.kv_scales)
    llm.reset_prefix_cache()  # blocks that it knew have been written to
    return runner.model.logits(hidden[len(prompt) - 1 :]).float()


def accuracy(
    cache: str, plain: Sequence[Text], llm: LLM, questions: Sequence[str], tokens: int
) -> CacheAccuracy:
    """Texts and logits of `llm` against those of the plain cache."""
    mine = [answer for _, answer in greedy_texts(llm, questions, tokens)]
    columns = [_errors(text, next_logits(llm, text.prompt, text.tokens)) for text in plain]
    every = {name: torch.cat([column[name] for column in columns]) for name in columns[0]}
    flips = every["margin"][every["flip"]].sort(descending=True).values.tolist()
    equal = [a == text.tokens for a, text in zip(mine, plain, strict=True)]
    return CacheAccuracy(
        cache=cache,
        num_texts=len(plain),
        equal_texts=sum(equal),
        common_prefix=[common_prefix(a, text.tokens) for a, text in zip(mine, plain, strict=True)],
        num_positions=len(every["flip"]),
        same_best=int((~every["flip"]).sum()),
        flip_margins=flips,
        closer_calls=int((every["margin"] <= flips[0]).sum()) if flips else 0,
        logit_spread=float(every["variance"].mean().sqrt()),
        logit_error=float(every["squares"].mean().sqrt()),
        worst_logit_error=float(every["worst"].max()),
        logprob_error=Spread.of(every["logprob"]),
        kl=Spread.of(every["kl"]),
    )


def _errors(text: Text, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Numbers of each position: [P]. In float64: a small KL is a difference of large sums."""
    plain, other = text.logits.double(), logits.double()
    # Softmax does not see what is added to a whole row: compare rows of mean 0.
    shape, error = _centred(plain), _centred(other) - _centred(plain)
    p, q = plain.log_softmax(-1), other.log_softmax(-1)
    best = plain.topk(2).values
    chosen = torch.tensor(text.tokens)[:, None]
    return {
        "flip": plain.argmax(-1) != other.argmax(-1),
        "margin": best[:, 0] - best[:, 1],
        "variance": shape.square().mean(-1),
        "squares": error.square().mean(-1),
        "worst": error.abs().amax(-1),
        "logprob": (p - q).gather(1, chosen)[:, 0].abs(),
        "kl": (p.exp() * (p - q)).sum(-1),
    }


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(-1, keepdim=True)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts share from the start."""
    pairs = enumerate(zip(a, b))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
