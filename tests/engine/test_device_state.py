"""Slots: who keeps one, who gets one, and that no token is lost when it changes hands."""

from __future__ import annotations

import random

import torch

from minivllm.engine.device_state import DeviceState
from minivllm.engine.step_plan import ScheduledRow, StepPlan

CPU = torch.device("cpu")


def plan(seq_ids: list[int]) -> StepPlan:
    return StepPlan([ScheduledRow(i, 0, 0, 1, [1], [0], None) for i in seq_ids], 0)


def test_a_sequence_keeps_its_slot() -> None:
    state = DeviceState(3, 4, CPU)
    first = state.assign(plan([10, 11]))
    assert len(set(first)) == 2
    assert state.assign(plan([11, 12, 10]))[::2] == first[::-1]
    assert state.assign(plan([10])) == first[:1]


def test_slots_stay_distinct_and_in_range() -> None:
    rng = random.Random(0)
    state, slots_of = DeviceState(4, 4, CPU), {}
    running: list[int] = []
    for step in range(500):
        running = [i for i in running if rng.random() < 0.8]
        while len(running) < 4 and rng.random() < 0.7:
            running.append(1000 + step * 10 + len(running))
        rng.shuffle(running)
        if not running:
            continue
        slots = state.assign(plan(running))
        assert len(set(slots)) == len(slots) and all(0 <= slot < 4 for slot in slots)
        for seq_id, slot in zip(running, slots, strict=True):
            assert slots_of.setdefault(seq_id, slot) == slot  # never moved while it runs


def test_the_one_that_sat_out_longest_gives_way() -> None:
    state = DeviceState(2, 4, CPU)
    first, second = state.assign(plan([1, 2]))
    state.assign(plan([1]))
    assert state.assign(plan([3])) == [second]
    assert state.assign(plan([3, 1])) == [second, first]


def test_newcomers_never_take_a_slot_of_the_same_step() -> None:
    """The running ones of a step are looked up before any newcomer is given a slot."""
    state = DeviceState(2, 4, CPU)
    first, second = state.assign(plan([1, 2]))
    assert state.assign(plan([3, 1])) == [second, first]
