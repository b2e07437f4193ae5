"""What stays on the device between steps: one row of numbers for every running sequence.

Owns the slots (rows of the device tables), who sits in which, and whether the row is up to date. A
decode step then needs six numbers a row from the host, and can start from a token that the host
has not read yet. Derives all of this from the plan: no scheduler has to report who came or went.
Lessons 10 and 15.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from minivllm.engine.step_plan import RowSampling, ScheduledRow, StepPlan
from minivllm.ops.pinned import to_device
from minivllm.ops.sampling import SamplingBatch

_NOTHING = RowSampling(0.0, 0, 1.0, 0.0, 0, 0, 0)


class DeviceState:
    """Tables of num_slots rows and one more, the pad row, which belongs to no sequence.

    | table | row of a decoding sequence |
    |---|---|
    | last_token [slots + 1] int64 | its newest token, whose K and V are not stored yet |
    | block_table [slots + 1, M] int32 | its blocks |
    | sampling | the numbers its tokens are drawn with, but for the position |
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.pad_slot = num_slots
        self.device = device
        rows = num_slots + 1
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.sampling = SamplingBatch.from_rows([_NOTHING] * rows, device)
        self._slots: OrderedDict[int, int] = OrderedDict()  # seq_id -> slot, oldest use first
        # What the device row holds: (seq_id, epoch, position). Anything else must be sent again.
        self._holds: list[tuple[int, int, int] | None] = [None] * rows
        # Known on the host, so that choosing the sampler's cheap path never waits for the device.
        self._greedy: npt.NDArray[np.bool_] = np.ones(rows, dtype=bool)
        self._filter: npt.NDArray[np.bool_] = np.zeros(rows, dtype=bool)

    def assign(self, plan: StepPlan) -> list[int]:
        """The slot of each row of the plan.

        A sequence that left simply stops being used, and its slot is the first to go to a newcomer.
        Launches run in order on one stream, so a slot may change hands before its old row is read.
        """
        for row in plan.rows:  # all of this step's first, so that none of them is evicted
            if row.seq_id in self._slots:
                self._slots.move_to_end(row.seq_id)
        slots = []
        for row in plan.rows:
            if row.seq_id not in self._slots:
                self._slots[row.seq_id] = self._take()
            slots.append(self._slots[row.seq_id])
        assert len(set(slots)) == len(slots), "more rows than slots"
        return slots

    def _take(self) -> int:
        if len(self._slots) == self.num_slots:
            return self._slots.popitem(last=False)[1]
        # No list of unused slots: a step interrupted between two lists would lose one for good.
        return min(set(range(self.num_slots)) - set(self._slots.values()))

    def prepare_decode(self, rows: Sequence[ScheduledRow], slots: Sequence[int]) -> None:
        """Bring the rows of a decode launch up to date: only newcomers and the preempted need it.

        A sequence that decoded in the step before is up to date: that step left its token here.
        """
        stale = []
        for row, slot in zip(rows, slots, strict=True):
            if self._holds[slot] != (row.seq_id, row.epoch, row.start):
                stale.append((row, slot))
            self._holds[slot] = (row.seq_id, row.epoch, row.end)
        if stale:
            self._upload([row for row, _ in stale], [slot for _, slot in stale])

    def flags(self, slots: Sequence[int]) -> tuple[bool, bool]:
        """(all rows greedy, any row filters)."""
        greedy = self._greedy[slots]
        return bool(greedy.all()), bool((self._filter[slots] & ~greedy).any())

    def _upload(self, rows: list[ScheduledRow], slots: list[int]) -> None:
        index = to_device(torch.tensor(slots), self.device)
        width = max(len(row.block_table) for row in rows)
        tables: npt.NDArray[np.int32] = np.zeros((len(rows), width), dtype=np.int32)
        for i, row in enumerate(rows):
            tables[i, : len(row.block_table)] = row.block_table
        self.block_table[index, :width] = to_device(torch.from_numpy(tables), self.device)
        # Where the token is not known here, the launch before this one has just written it.
        known = [(slot, row.token_ids[0]) for row, slot in zip(rows, slots) if row.token_ids]
        if known:
            places, tokens = to_device(torch.tensor(known).T.contiguous(), self.device)
            self.last_token[places] = tokens
        samplings = [row.sampling or _NOTHING for row in rows]
        self.sampling.update(index, SamplingBatch.from_rows(samplings, self.device))
        self._greedy[slots] = [s.temperature <= 0 for s in samplings]
        self._filter[slots] = [s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in samplings]
