"""Runs one step plan on the device: inputs, model, sampling, results.

Owns the weights, the KV tensor and the device state. Never plans and never ends a sequence: it
computes the rows it is given, and says what was sampled. `launch` may return before the device is
done; `collect` waits. Lesson 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minivllm.engine.device_state import DeviceState
from minivllm.engine.input_batch import InputBatch, build_inputs
from minivllm.engine.step_plan import StepPlan, StepResult, TokenLogprobs
from minivllm.models.decoder import CausalLM
from minivllm.ops.logprobs import top_logprobs
from minivllm.ops.sampling import SamplingBatch
from minivllm.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: device tensors that `collect` turns into a result."""

    plan: StepPlan
    sampled: torch.Tensor  # [rows that sample] int64
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]


class ModelRunner:
    """The device half of the engine."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv_cache: torch.Tensor,
        *,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.ops = ops
        self.kv_cache = kv_cache  # [L, 2, N, S, Hkv, D]
        self.block_size = kv_cache.shape[3]
        self.device = device
        self.state = DeviceState(max_num_seqs, device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start a step. Its sampled tokens stay on the device for the next step to use."""
        slots = self.state.assign(plan)
        inputs = build_inputs(plan, self.block_size, self.device)
        if inputs.unread:
            sources = [slots[row] for row in inputs.unread_rows]
            inputs.ids[inputs.unread] = self.state.last_token[sources]
        hidden = self.model(inputs.ids, inputs.batch, self.kv_cache)  # [T, H]
        prompt_logprobs = self._prompt_logprobs(plan, inputs, hidden)

        rows = [index for index, row in enumerate(plan.rows) if row.sampling is not None]
        if not rows:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            return Launched(plan, empty, [], prompt_logprobs)
        # Only each sequence's last token is scored: the head is the largest matrix of a small
        # model, and over a whole prompt it would cost more than all layers together.
        logits = self.model.logits(hidden[[inputs.last_rows[row] for row in rows]])  # [R, V]
        samplings = [row.sampling for row in plan.rows if row.sampling is not None]
        sampled = self.ops.sample(logits, SamplingBatch.from_rows(samplings, self.device))
        self.state.last_token[[slots[row] for row in rows]] = sampled
        # Before the logits' memory is used again. Raw logits, as in vLLM.
        logprobs = _logprobs(logits, sampled, [sampling.logprobs for sampling in samplings])
        return Launched(plan, sampled, logprobs, prompt_logprobs)

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step and read its results, in the order of its plan's rows."""
        sampled = iter(launched.sampled.tolist())
        logprobs = iter(launched.logprobs)
        samples = [row.sampling is not None for row in launched.plan.rows]
        return StepResult(
            token_ids=[next(sampled) if sample else None for sample in samples],
            logprobs=[next(logprobs) if sample else None for sample in samples],
            prompt_logprobs=launched.prompt_logprobs,
        )

    def _prompt_logprobs(
        self, plan: StepPlan, inputs: InputBatch, hidden: torch.Tensor
    ) -> list[list[TokenLogprobs]]:
        """Per row, the log-probabilities of the prompt tokens that follow this chunk's."""
        results: list[list[TokenLogprobs]] = [[] for _ in plan.rows]
        for index, row in enumerate(plan.rows):
            asked = row.prompt_logprobs
            if asked is None:
                continue
            first = inputs.last_rows[index] - row.num_tokens + 1
            logits = self.model.logits(hidden[first : first + len(asked.targets)])
            targets = torch.tensor(asked.targets, device=self.device)
            found = _logprobs(logits, targets, [asked.count] * len(asked.targets))
            results[index] = [item for item in found if item is not None]
        return results


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int | None]
) -> list[TokenLogprobs | None]:
    """Log-probabilities for the rows that ask for them. logits: [R, V], token_ids: [R]."""
    found: list[TokenLogprobs | None] = [None] * len(counts)
    asking = [row for row, count in enumerate(counts) if count is not None]
    if not asking:
        return found
    most = min(max(counts[row] or 0 for row in asking), logits.shape[-1])
    chosen_ids = token_ids[asking]
    values, ids, chosen, rank = (
        tensor.tolist() for tensor in top_logprobs(logits[asking], chosen_ids, most)
    )
    for i, row in enumerate(asking):
        count = counts[row] or 0
        found[row] = TokenLogprobs(
            token_id=int(chosen_ids[i]),
            logprob=chosen[i],
            rank=rank[i],
            top_ids=ids[i][:count],
            top_logprobs=values[i][:count],
        )
    return found
