"""The plan is all that a runner gets: it survives the wire, in every state of a sequence.

Case K24: what is sent for a sequence must be enough for what the step does with it, also when it
was preempted after it had begun to generate. (That a runner needs nothing else is shown by
`async_runner`, which computes from pickled copies alone.)
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from harness import make_setup

from minivllm.engine.input_batch import PackedRows, pack_rows
from minivllm.engine.step_plan import ScheduledRow, StepPlan
from minivllm.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)


def plans_of_a_life() -> dict[str, StepPlan]:
    """Plans with a sequence new, half prefilled, decoding, preempted, and found in the cache."""
    setup = make_setup(depth=0, budget=6, num_blocks=12, block_size=3)
    found: dict[str, StepPlan] = {}
    launch = setup.runner.launch

    def recording(plan: StepPlan):
        found.setdefault(name, plan)
        return launch(plan)

    setup.runner.launch = recording
    name = "new"
    (seq,) = setup.add("a", [1, 2, 3, 4, 5, 6, 1, 2], PARAMS)
    setup.step()
    name = "half prefilled"
    setup.step()
    name = "decoding"
    while len(seq.completion_ids) < 5:
        setup.step()
    setup.scheduler.preempt(seq)
    name = "preempted"
    setup.step()
    setup.run()
    name = "cached prefix"
    setup.add("b", [1, 2, 3, 4, 5, 6, 1, 2], SamplingParams(temperature=0))
    setup.step()
    setup.run()
    return found


def test_rows_carry_the_tokens_they_compute() -> None:
    plans = plans_of_a_life()
    rows = {name: plan.rows[0] for name, plan in plans.items()}
    assert rows["new"].token_ids == [1, 2, 3, 4, 5, 6] and rows["new"].sampling is None
    assert rows["half prefilled"].token_ids == [1, 2]
    assert rows["half prefilled"].sampling is not None
    assert len(rows["decoding"].token_ids) == 1 and plans["decoding"].num_decode == 1
    # After preemption, all of them: prompt and what was generated.
    assert (rows["preempted"].start, rows["preempted"].token_ids[:6]) == (0, [1, 2, 3, 4, 5, 6])
    assert rows["preempted"].epoch == 1 and plans["preempted"].num_decode == 0
    assert (rows["cached prefix"].start, rows["cached prefix"].token_ids) == (6, [1, 2])
    assert len(rows["cached prefix"].block_table) == 3


def test_round_trip() -> None:
    for name, plan in plans_of_a_life().items():
        copy = pickle.loads(pickle.dumps(plan))
        assert copy == plan, name
        prefills, again = plan.rows[plan.num_decode :], copy.rows[plan.num_decode :]
        if not prefills:
            continue
        one, two = (pack_rows(rows, 3) for rows in (prefills, again))
        for field in PackedRows.__slots__:
            assert (getattr(one, field) == getattr(two, field)).all()


def test_another_process_reads_it_without_torch() -> None:
    """Nothing about the plan depends on the state of the process that wrote it."""
    plans = plans_of_a_life()
    code = (
        "import pickle, sys\n"
        "plans = pickle.load(sys.stdin.buffer)\n"
        "assert 'torch' not in sys.modules\n"
        "sys.stdout.write(repr(plans))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(plans), capture_output=True, check=True
    )
    assert result.stdout.decode() == repr(plans)


def test_counts() -> None:
    rows = [
        ScheduledRow(0, 0, 7, 8, [], [1, 2], None),
        ScheduledRow(1, 0, 0, 5, [1] * 5, [3, 4], None),
    ]
    assert StepPlan(rows, 1).num_tokens == 6 and rows[0].num_tokens == 1


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_inputs_of_prefill_rows(block_size: int) -> None:
    """Packed without padding; tables padded with -1; every token at its own slot."""
    tables = [[2, 5] if block_size > 1 else [2, 5, 1, 9], [7], [3, 0] + [8, 4, 6, 11, 10]]
    rows = [
        ScheduledRow(0, 0, 1, 4, [11, 12, 13], tables[0], None),
        ScheduledRow(1, 0, 0, 1, [21], tables[1], None),
        ScheduledRow(2, 0, 2, 6, [33, 34, 35, 36], tables[2], None),
    ]
    packed = pack_rows(rows, block_size)
    inputs = packed.to(torch.device("cpu"))
    assert inputs.ids.tolist() == [11, 12, 13, 21, 33, 34, 35, 36]
    assert packed.last_rows == [2, 3, 7]
    batch = inputs.batch
    assert batch.positions.tolist() == [1, 2, 3, 0, 2, 3, 4, 5]
    assert batch.context_lens.tolist() == [4, 1, 6]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 8] and batch.max_seqlen_q == 4
    assert batch.num_decode == 0
    assert batch.block_tables.tolist() == [t + [-1] * (7 - len(t)) for t in tables]
    slots = [
        row.block_table[p // block_size] * block_size + p % block_size
        for row in rows
        for p in range(row.start, row.end)
    ]
    assert batch.slot_mapping.tolist() == slots
    assert batch.block_tables.dtype == batch.context_lens.dtype == torch.int32
    assert batch.positions.dtype == batch.slot_mapping.dtype == torch.int64
