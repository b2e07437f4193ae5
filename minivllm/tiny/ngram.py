"""Unigram and trigram baselines: what counting alone achieves on the held-out stories.

Witten-Bell interpolation: every context mixes its own counts with the shorter context's, weighted
by how many different tokens followed it. Pure Python; used by `evaluate` beside the model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence


class NGram:
    """An interpolated n-gram model over token ids, documents padded on the left with -1."""

    def __init__(self, documents: Sequence[Sequence[int]], order: int, vocab_size: int) -> None:
        if not 1 <= order <= 3:
            raise ValueError(f"order is {order}, must be 1, 2 or 3")
        self.order, self.vocab_size = order, vocab_size
        self.counts: list[dict[tuple[int, ...], Counter[int]]] = []
        for n in range(order):
            table: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
            for document in documents:
                padded = [-1] * n + list(document)
                for i in range(n, len(padded)):
                    table[tuple(padded[i - n : i])][padded[i]] += 1
            self.counts.append(dict(table))
        self.totals = [{c: sum(t.values()) for c, t in table.items()} for table in self.counts]

    def probability(self, context: tuple[int, ...], token: int) -> float:
        """P(token | the last order - 1 tokens of context)."""
        p = 1.0 / self.vocab_size
        for n in range(self.order):
            key = context[len(context) - n :]
            seen = self.counts[n].get(key)
            if seen is None:
                break
            kinds, total = len(seen), self.totals[n][key]
            p = (seen[token] + kinds * p) / (total + kinds)
        return p

    def perplexity(self, documents: Sequence[Sequence[int]]) -> float:
        """exp of the mean negative log-probability of every token of the documents."""
        nats, count = 0.0, 0
        for document in documents:
            padded = (-1,) * (self.order - 1) + tuple(document)
            for i in range(self.order - 1, len(padded)):
                nats -= math.log(self.probability(padded[i - self.order + 1 : i], padded[i]))
                count += 1
        return math.exp(nats / count)
