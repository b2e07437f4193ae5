"""Log-probabilities of a launch, computed on the device and read later.

Owns the pairing of asking rows with their numbers. Never waits before `read`: at depth 1 a launch
must not stop the host. Lesson 01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minivllm.engine.step_plan import TokenLogprobs
from minivllm.ops.logprobs import top_logprobs
from minivllm.ops.pinned import OnItsWay, start_copy_to_host, to_device


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Numbers of the asking rows, on their way to the host."""

    counts: list[int | None]  # per row of the launch; None where it does not ask
    # Of the A asking rows: token [A], values [A, k], ids [A, k], chosen [A], rank [A].
    found: tuple[OnItsWay, ...] = ()

    def read(self) -> list[TokenLogprobs | None]:
        """Wait, and give each row its own count of entries."""
        results: list[TokenLogprobs | None] = [None] * len(self.counts)
        if not self.found:
            return results
        asking = [row for row, count in enumerate(self.counts) if count is not None]
        columns = [tensor.wait().tolist() for tensor in self.found]
        for row, token, values, ids, chosen, rank in zip(asking, *columns, strict=True):
            count = self.counts[row]
            results[row] = TokenLogprobs(token, chosen, rank, ids[:count], values[:count])
        return results


def start_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int | None]
) -> PendingLogprobs:
    """Queue the work for the rows that ask. logits: [R, V], token_ids: [R]."""
    asking = [row for row, count in enumerate(counts) if count is not None]
    if not asking:
        return PendingLogprobs(list(counts))
    most = min(max(counts[row] or 0 for row in asking), logits.shape[-1])
    index = to_device(torch.tensor(asking), logits.device)
    chosen = token_ids[index]
    found = (chosen, *top_logprobs(logits[index], chosen, most))
    return PendingLogprobs(list(counts), tuple(start_copy_to_host(tensor) for tensor in found))
