"""What stays on the device between steps: the newest token of every running sequence.

Owns the slots (rows of device tables) and who sits in which. A step can then start from a token
that the host has not read yet. Derives everything from the plan: no scheduler has to report who
came or went. Lessons 10 and 15.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from minivllm.engine.step_plan import StepPlan


class DeviceState:
    """Slots in least-recently-used order: a sequence keeps its slot while it runs."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._slots: OrderedDict[int, int] = OrderedDict()  # seq_id -> slot, oldest use first

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
