"""Training rows: documents packed into rows of 256, 512 and 1,024 tokens.

Owns the order of the data, a pure function of the seed: that is what makes training resumable
from a step number alone. Every row begins at a document's start, as a prompt does later; long
rows let positions up to 1,024 be learned, short rows teach how a context begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minivllm.tiny.data import IDS, NO_LOSS, PAD

ROW_SHARES = {256: 0.35, 512: 0.35, 1024: 0.30}
IGNORE = -100


@dataclass(frozen=True)
class Phase:
    """A part of the training: how often an epoch sees each stream, and how many epochs."""

    epochs: float
    weights: dict[str, float]


# The unfinished stories teach words and grammar, but also the habit of never ending: they leave
# before the end. The last phase sees only stories that end, mostly those that hold together.
PLANS: dict[str, tuple[Phase, ...]] = {
    "main": (
        Phase(
            4.0,
            {
                "incomplete_raw": 1.0,
                "complete_raw": 1.0,
                "complete_chat": 0.7,
                "told_raw": 0.35,
                "told_chat": 0.3,
                "answers": 0.25,
            },
        ),
        Phase(
            1.5,
            {
                "complete_raw": 0.5,
                "good_raw": 1.0,
                "good_chat": 0.7,
                "told_raw": 0.8,
                "told_chat": 0.6,
                "answers": 1.0,
            },
        ),
    ),
    "told": (
        Phase(
            4.0,
            {
                "incomplete_raw": 0.8,
                "complete_raw": 1.0,
                "complete_chat": 0.5,
                "told_raw": 0.6,
                "told_chat": 0.5,
                "answers": 0.35,
            },
        ),
        Phase(
            1.5,
            {
                "complete_raw": 0.7,
                "good_raw": 0.6,
                "good_chat": 0.4,
                "told_raw": 1.0,
                "told_chat": 0.8,
                "answers": 1.2,
            },
        ),
    ),
    "tiny": (Phase(1.0, {"told_raw": 0.01, "answers": 0.01}),),
}


def repeat(documents: Sequence[np.ndarray], times: float, rng: np.random.Generator) -> list:
    """Each document floor(times) times, and a random part of them once more."""
    whole, rest = int(times), times - int(times)
    extra = rng.permutation(len(documents))[: round(rest * len(documents))]
    return [*documents] * whole + [documents[i] for i in extra]


def pack(documents: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Rows [R, length + 1] of flagged ids; the document that crosses a row's end is cut there."""
    rows: list[np.ndarray] = []
    row: np.ndarray = np.full(length + 1, PAD | NO_LOSS, dtype=np.uint16)
    used = 0
    for document in documents:
        part = document[: length + 1 - used]
        row[used : used + len(part)] = part
        used += len(part)
        if used == length + 1:
            rows.append(row)
            row, used = np.full(length + 1, PAD | NO_LOSS, dtype=np.uint16), 0
    return np.stack(rows) if rows else np.zeros((0, length + 1), dtype=np.uint16)


def epoch_batches(
    streams: dict[str, list[np.ndarray]],
    weights: dict[str, float],
    share: float,
    tokens_per_step: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Batches [rows, length + 1] of one epoch in random order, each of `tokens_per_step` tokens."""
    missing = sorted(set(weights) - set(streams))
    if missing:
        raise ValueError(f"the data has no stream {missing[0]!r}, only {sorted(streams)}")
    documents = [
        d for name in sorted(weights) for d in repeat(streams[name], weights[name] * share, rng)
    ]
    order = rng.permutation(len(documents))
    batches, start = [], 0
    for length, part in ROW_SHARES.items():
        stop = start + round(part * len(documents))
        rows = pack([documents[i] for i in order[start:stop]], length)
        per_batch = max(1, tokens_per_step // length)
        # A last, smaller batch would weigh its few rows too much, so it is left out.
        batches += [rows[i : i + per_batch] for i in range(0, len(rows) - per_batch + 1, per_batch)]
        start = stop
    return [batches[i] for i in rng.permutation(len(batches))]


def plan_batches(
    streams: dict[str, list[np.ndarray]], plan: Sequence[Phase], tokens_per_step: int, seed: int
) -> list[np.ndarray]:
    """All batches of a training in order; the same arguments give the same list."""
    batches: list[np.ndarray] = []
    for number, phase in enumerate(plan):
        left, epoch = phase.epochs, 0
        while left > 1e-9:
            share = min(1.0, left)
            rng = np.random.default_rng([seed, number, epoch])
            batches += epoch_batches(streams, phase.weights, share, tokens_per_step, rng)
            left, epoch = left - share, epoch + 1
    return batches


def inputs_and_targets(batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flagged rows [R, L + 1] -> input ids [R, L], targets [R, L] (IGNORE where no loss falls)."""
    ids = (batch & IDS).astype(np.int64)
    targets = np.where(batch & NO_LOSS, IGNORE, ids)
    return ids[:, :-1], targets[:, 1:]
