"""Runs one step plan on the device: inputs, model, sampling, results.

Owns the weights, the KV tensor and the device state. Never plans and never ends a sequence: it
computes the rows it is given, and says what was sampled. `launch` may return before the device is
done; `collect` waits. Lesson 10.

A mixed step is two launches under one plan, decode rows and prefill rows: it reads the weights once
more, and keeps decode fast and independent of its neighbours' prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from minivllm.engine.decode_graphs import DecodeGraphs
from minivllm.engine.decode_step import decode_step
from minivllm.engine.device import on_device
from minivllm.engine.device_state import DeviceState
from minivllm.engine.input_batch import pack_decode, pack_rows
from minivllm.engine.prefill_graphs import PrefillGraphs
from minivllm.engine.row_logprobs import PendingLogprobs, start_logprobs
from minivllm.engine.step_graphs import StepGraphs, capture_all
from minivllm.engine.step_plan import ScheduledRow, StepPlan, StepResult
from minivllm.models.decoder import CausalLM
from minivllm.ops.attention_batch import AttentionBatch
from minivllm.ops.pinned import OnItsWay, record_event, start_copy_to_host, to_device
from minivllm.ops.sampling import SamplingBatch
from minivllm.ops.table import Ops

SCORED_ROWS = 256  # of a prompt's log-probabilities at a time
# (all greedy, any filter) of a captured sampler: the form that serves every mix of requests.
CAPTURED_FLAGS = (False, True)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of one launch on their way to the host, with their log-probabilities."""

    rows: list[int]  # the plan's rows that sample, in the order of the tokens
    tokens: OnItsWay  # [len(rows)] int64
    logprobs: PendingLogprobs


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: what `collect` turns into a result."""

    plan: StepPlan
    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[PendingLogprobs]]  # by row of the plan, in slices
    ended: torch.cuda.Event | None  # behind all of it


class ModelRunner:
    """The device half of the engine."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv_cache: torch.Tensor,
        kv_scales: torch.Tensor | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.ops = ops
        self.kv_cache = kv_cache  # [L, 2, N, S, Hkv, D]
        self.kv_scales = kv_scales  # [L, 2, N, S, Hkv] float32, of an 8-bit cache
        self.num_blocks, self.block_size = kv_cache.shape[2], kv_cache.shape[3]
        self.device = device
        self.graphs: StepGraphs | None = None  # see capture_graphs
        self.state = DeviceState(max_num_seqs, -(-max_model_len // self.block_size), device)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool."""
        scales = 0 if self.kv_scales is None else self.kv_scales.nbytes
        return self.kv_cache.nbytes + scales

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start a step. Its sampled tokens stay on the device for the next step to use."""
        slots = self.state.assign(plan)
        split = plan.num_decode
        sampled: list[Sampled] = []
        prompt_logprobs: dict[int, list[PendingLogprobs]] = {}
        with on_device(self.device):
            if split > 0:
                sampled.append(self._decode(plan.rows[:split], slots[:split]))
            if split < len(plan.rows):
                self._prefill(plan, slots, sampled, prompt_logprobs)
            return Launched(plan, sampled, prompt_logprobs, record_event(self.device))

    def collect(self, launched: Launched) -> StepResult:
        """Wait for a step and read its results, in the order of its plan's rows."""
        if launched.ended is not None:
            launched.ended.synchronize()  # a chunk that samples nothing is waited for as well
        count = len(launched.plan.rows)
        result = StepResult([None] * count, [None] * count, [[] for _ in range(count)])
        for part in launched.sampled:
            logprobs = part.logprobs.read()
            for i, (row, token) in enumerate(
                zip(part.rows, part.tokens.wait().tolist(), strict=True)
            ):
                result.token_ids[row] = token
                result.logprobs[row] = logprobs[i]
        for row, slices in launched.prompt_logprobs.items():
            found = [item for pending in slices for item in pending.read()]
            result.prompt_logprobs[row] = [item for item in found if item is not None]
        return result

    @torch.inference_mode()
    def capture_graphs(self, max_tokens: int | None) -> StepGraphs:
        """Record both kinds of launch; from here on `launch` replays them.

        max_tokens: of a prefill launch; None where the backend's prefill cannot be captured.
        """
        weight, state = self.model.model.embed_tokens.weight, self.state
        width = state.block_table.shape[1]

        def decode(numbers: torch.Tensor, logits_out: torch.Tensor) -> torch.Tensor:
            return self._decode_step(numbers, width, CAPTURED_FLAGS, logits_out)[0]

        def prefill(ids: torch.Tensor, batch: AttentionBatch, out: torch.Tensor) -> None:
            out.copy_(self.model(ids, batch, self.kv_cache, self.kv_scales))

        decode_graphs = DecodeGraphs(
            max_num_seqs=state.num_slots,
            vocab_size=weight.shape[0],
            dtype=weight.dtype,
            pad_slot=state.pad_slot,
            device=self.device,
        )
        prefill_graphs = None
        if max_tokens is not None:
            prefill_graphs = PrefillGraphs(
                max_tokens=max_tokens,
                max_rows=state.num_slots,
                table_width=width,
                hidden_size=weight.shape[1],
                dtype=weight.dtype,
                device=self.device,
            )
        with on_device(self.device):
            self.graphs = capture_all(decode_graphs, decode, prefill_graphs, prefill)
        return self.graphs

    def _decode_step(
        self,
        numbers: torch.Tensor,
        table_width: int,
        flags: tuple[bool, bool],
        logits_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_step(
            self.model,
            self.ops,
            self.state,
            (self.kv_cache, self.kv_scales),
            numbers,
            table_width=table_width,
            flags=flags,
            logits_out=logits_out,
        )

    def _decode(self, rows: Sequence[ScheduledRow], slots: Sequence[int]) -> Sampled:
        """Launch the decode rows: one token each, out of the device state."""
        self.state.prepare_decode(rows, slots)
        # Longest context first: the last programs of a plain grid are then the short ones.
        order = sorted(range(len(rows)), key=lambda i: -rows[i].start)
        rows, slots = [rows[i] for i in order], [slots[i] for i in order]
        numbers = pack_decode(rows, slots, self.block_size)
        if self.graphs is not None:
            tokens, logits = self.graphs.decode.replay(numbers)
        else:
            tokens, logits = self._decode_step(
                to_device(torch.from_numpy(numbers), self.device),
                rows[0].start // self.block_size + 1,
                self.state.flags(slots),
            )
        counts = [row.sampling.logprobs if row.sampling else None for row in rows]
        # Before the logits' memory is used again. Raw logits, as in vLLM.
        logprobs = start_logprobs(logits, tokens, counts)
        return Sampled(order, start_copy_to_host(tokens), logprobs)

    def _prefill(
        self,
        plan: StepPlan,
        slots: Sequence[int],
        sampled: list[Sampled],
        prompt_logprobs: dict[int, list[PendingLogprobs]],
    ) -> None:
        """Launch the prefill rows: chunks of prompts; those that reach the end sample a token."""
        first, rows = plan.num_decode, plan.rows[plan.num_decode :]
        packed = pack_rows(rows, self.block_size)
        last_rows = packed.last_rows
        graphs = None if self.graphs is None else self.graphs.prefill
        if graphs is not None and graphs.fits(packed):
            hidden = graphs.replay(packed)  # [T, H]
        else:
            inputs = packed.to(self.device)
            hidden = self.model(inputs.ids, inputs.batch, self.kv_cache, self.kv_scales)
        for index, row in enumerate(rows):
            if row.prompt_logprobs is not None:
                slices = self._prompt_logprobs(row, last_rows[index], hidden)
                prompt_logprobs[first + index] = slices
        samplings = [row.sampling for row in rows if row.sampling is not None]
        if not samplings:
            return
        ends = [index for index, row in enumerate(rows) if row.sampling is not None]
        numbers = [[last_rows[index] for index in ends], [slots[first + index] for index in ends]]
        last, seats = to_device(torch.tensor(numbers), self.device)  # [R], [R]
        # Only each sequence's last token is scored: the head is the largest matrix of a small
        # model, and over a whole prompt it would cost more than all layers together.
        logits = self.model.logits(hidden[last])  # [R, V]
        batch = SamplingBatch.from_rows(samplings, self.device)
        if self.graphs is not None:
            # Other forms of the kernels would be compiled now, for seconds.
            all_greedy, any_filter = CAPTURED_FLAGS
            batch = replace(batch, all_greedy=all_greedy, any_filter=any_filter)
        tokens = self.ops.sample(logits, batch)
        self.state.last_token[seats] = tokens
        logprobs = start_logprobs(logits, tokens, [sampling.logprobs for sampling in samplings])
        rows_of_plan = [first + index for index in ends]
        sampled.append(Sampled(rows_of_plan, start_copy_to_host(tokens), logprobs))

    def _prompt_logprobs(
        self, row: ScheduledRow, last_row: int, hidden: torch.Tensor
    ) -> list[PendingLogprobs]:
        """Log-probabilities of the prompt tokens that follow this chunk's.

        In slices, for the logits of a whole chunk would take more memory than the step: 8,192 rows
        of 152k tokens are 25 GB with all that ranking them needs.
        """
        asked = row.prompt_logprobs
        assert asked is not None
        start, slices = last_row - row.num_tokens + 1, []
        for first in range(0, len(asked.targets), SCORED_ROWS):
            targets = asked.targets[first : first + SCORED_ROWS]
            rows = hidden[start + first : start + first + len(targets)]
            wanted = to_device(torch.tensor(targets), self.device)
            counts = [asked.count] * len(targets)
            slices.append(start_logprobs(self.model.logits(rows), wanted, counts))
        return slices
