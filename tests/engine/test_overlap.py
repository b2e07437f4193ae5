"""The rules of overlapped steps, one by one, over a runner that computes as late as it may.

At depth 1 step n + 1 is launched before the tokens of step n are read. What the design says about
that is stated here as small scenes; `test_random_workloads.py` does the same at random.
"""

from __future__ import annotations

import itertools

import pytest
from async_runner import EOS
from harness import Setup, make_setup

from minivllm.engine.sequence import Status
from minivllm.outputs import CompletionOutput
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import Tokenizer

GREEDY = {"temperature": 0.0}


def script(setup: Setup, texts: dict[int, list[int]]) -> None:
    """Let the device generate these tokens, by sequence id; afterwards 5 for ever."""
    prompts = {seq_id: len(history) for seq_id, history in setup.device.history.items()}

    def rule(_digest: int, row) -> int:
        text = texts.get(row.seq_id, [])
        at = row.end - prompts.get(row.seq_id, 0)
        return text[at] if at < len(text) else 5

    setup.device.token_rule = rule


def only(setup: Setup, name: str) -> CompletionOutput:
    """The one sample of a finished request."""
    (sample,) = setup.outputs[name].outputs
    return sample


def launched_rows(setup: Setup) -> list[tuple[int, int, int]]:
    """(seq_id, start, end) of every row the device has been given from here on."""
    rows: list[tuple[int, int, int]] = []
    launch = setup.runner.launch

    def recording(plan):
        rows.extend((row.seq_id, row.start, row.end) for row in plan.rows)
        return launch(plan)

    setup.runner.launch = recording
    return rows


# -- the loop -------------------------------------------------------------------------------------


def test_depth_0_reads_each_step_before_the_next_launch() -> None:
    setup = make_setup(depth=0)
    setup.add("a", [1, 2, 3], SamplingParams(**GREEDY, max_tokens=4, ignore_eos=True))
    while setup.engine.has_unfinished:
        assert len(setup.step()) == 1
    assert setup.runner.max_in_flight == 1


def test_depth_1_launches_before_it_reads() -> None:
    setup = make_setup(depth=1)
    setup.add("a", [1, 2, 3], SamplingParams(**GREEDY, max_tokens=4, ignore_eos=True))
    assert setup.step() == []  # the first step is only launched
    assert (setup.runner.launches, setup.runner.collects) == (1, 0)
    assert setup.device.rows_checked == 0  # and nothing has been computed
    assert [state.request_id for state in setup.step()] == ["a"]
    assert (setup.runner.launches, setup.runner.collects) == (2, 1)
    setup.run()
    assert setup.runner.max_in_flight == 2
    assert setup.runner.launches == 4  # no step more than the tokens need


def test_work_in_flight_counts_as_unfinished() -> None:
    setup = make_setup(depth=1)
    setup.add("a", [1], SamplingParams(**GREEDY, max_tokens=1))
    setup.step()
    assert setup.engine.has_unfinished
    assert setup.engine.abort("a") is not None
    assert setup.engine.has_unfinished and not setup.engine.requests
    setup.run()


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [True, False])
def test_max_tokens_is_known_in_advance(late: bool) -> None:
    """Finishing by length costs no extra row, whatever the cap and the position in a block."""
    for prompt, cap in itertools.product(range(1, 10), range(1, 10)):
        setup = make_setup(depth=1, late=late)
        rows = launched_rows(setup)
        params = SamplingParams(**GREEDY, max_tokens=cap, ignore_eos=True)
        setup.add("a", [1] * prompt, params)
        setup.run()
        assert len(only(setup, "a").token_ids) == cap
        assert only(setup, "a").finish_reason == "length"
        # The last token is reported and never computed.
        assert max(end for _, _, end in rows) == prompt + cap - 1
        assert sum(end - start for _, start, end in rows) == prompt + cap - 1
        assert setup.engine.stats.preemptions == 0


def test_max_model_len_and_pool_end_without_an_extra_row() -> None:
    for options, expected in (
        ({"max_model_len": 11}, ("length", None, 8)),
        ({"num_blocks": 2, "max_model_len": 64}, ("length", "kv_capacity", 6)),
    ):
        setup = make_setup(depth=1, **options)
        params = SamplingParams(**GREEDY, max_tokens=None, ignore_eos=True)
        setup.add("a", [1, 2, 3], params)
        setup.run()
        sample = only(setup, "a")
        assert (sample.finish_reason, sample.stop_reason, len(sample.token_ids)) == expected


@pytest.mark.parametrize("stop", [EOS, 4])
def test_stop_token_is_seen_one_step_late(stop: int) -> None:
    """The extra row runs, its token is dropped, and its blocks come back when it is read."""
    setup = make_setup(depth=1, num_blocks=3, block_size=4)
    rows = launched_rows(setup)
    params = SamplingParams(**GREEDY, max_tokens=20, stop_token_ids=[4])
    (seq,) = setup.add("a", [1, 2, 3], params)
    script(setup, {seq.seq_id: [5, 6, stop, 1, 2]})
    while not seq.finished:
        setup.step()
    # The extra row (positions 5..6) is in flight: all blocks stay.
    assert rows[-1] == (seq.seq_id, 5, 6) and seq.steps_in_flight == 1
    assert setup.scheduler.draining == {seq.seq_id: seq}
    assert setup.scheduler.block_manager.num_used == 2
    setup.run()
    sample = only(setup, "a")
    assert sample.token_ids == [5, 6, stop] and sample.finish_reason == "stop"
    assert sample.stop_reason == (None if stop == EOS else stop)
    assert setup.device.history[seq.seq_id][3:] == [5, 6, stop, 1]  # drawn, and dropped


def test_stop_token_as_the_last_allowed_one() -> None:
    """Ends by length and by EOS in one token: "stop", and no extra row."""
    setup = make_setup(depth=1)
    (seq,) = setup.add("a", [1, 2], SamplingParams(**GREEDY, max_tokens=2))
    script(setup, {seq.seq_id: [5, EOS]})
    setup.run()
    assert only(setup, "a").finish_reason == "stop"
    assert setup.runner.launches == 2


def test_stop_string_across_tokens_drops_the_extra_token(tokenizer: Tokenizer) -> None:
    setup = make_setup(depth=1, tokenizer=tokenizer)
    params = SamplingParams(**GREEDY, max_tokens=20, stop=["bc"], logprobs=0)
    (seq,) = setup.add("a", [1, 2], params)
    script(setup, {seq.seq_id: tokenizer.encode("abcde")})
    setup.run()
    sample = only(setup, "a")
    assert sample.text == "a" and sample.token_ids == tokenizer.encode("abc")
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "bc")
    assert len(sample.logprobs) == 3


def test_stop_string_of_a_sequence_preempted_in_flight(tokenizer: Tokenizer) -> None:
    """It was to queue again; its last token ends it instead."""
    setup = make_setup(depth=1, tokenizer=tokenizer)
    (seq,) = setup.add("a", [1, 2], SamplingParams(**GREEDY, max_tokens=20, stop=["bc"]))
    script(setup, {seq.seq_id: tokenizer.encode("abcde")})
    while seq.completion_ids != tokenizer.encode("ab"):
        setup.step()
    setup.scheduler.preempt(seq)
    setup.check()
    setup.run()
    assert only(setup, "a").token_ids == tokenizer.encode("abc")
    assert only(setup, "a").stop_reason == "bc"


@pytest.mark.parametrize(("last", "reason"), [(EOS, "stop"), (5, "length")])
def test_end_of_a_sequence_preempted_in_flight(last: int, reason: str) -> None:
    """By id or by length: it is not queued again, and its seat and blocks come back."""
    setup = make_setup(depth=1)
    (seq,) = setup.add("a", [1, 2], SamplingParams(**GREEDY, max_tokens=3))
    script(setup, {seq.seq_id: [5, 6, last]})
    while len(seq.completion_ids) < 2:
        setup.step()
    assert seq.num_pending == 1
    setup.scheduler.preempt(seq)
    launches = setup.runner.launches
    setup.run()
    assert only(setup, "a").token_ids == [5, 6, last]
    assert only(setup, "a").finish_reason == reason
    assert setup.runner.launches == launches


# -- logprobs -------------------------------------------------------------------------------------


def test_logprobs_belong_to_their_tokens_and_the_extra_ones_are_dropped() -> None:
    for depth, budget in itertools.product((0, 1), (2, 3, 16)):
        setup = make_setup(depth=depth, budget=budget, max_num_seqs=2)
        params = SamplingParams(**GREEDY, max_tokens=9, logprobs=2, prompt_logprobs=1)
        (seq,) = setup.add("a", [1, 2, 3, 1, 2], params)
        script(setup, {seq.seq_id: [5, 6, 1, EOS, 2]})
        setup.run()
        output, sample = setup.outputs["a"], only(setup, "a")
        history = [1, 2, 3, 1, 2, 5, 6, 1, EOS]
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *sample.logprobs]
        assert len(entries) == len(history) - 1
        for position, entry in enumerate(entries, 1):
            expected = setup.device._entry(history, position, 1).logprob
            assert entry[history[position]].logprob == expected
        total = sum(entry[t].logprob for entry, t in zip(sample.logprobs, sample.token_ids))
        assert sample.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_of_a_request_aborted_in_flight() -> None:
    setup = make_setup(depth=1, budget=4)
    setup.add("a", [1] * 9, SamplingParams(**GREEDY, max_tokens=3, prompt_logprobs=0))
    setup.add("b", [2] * 3, SamplingParams(**GREEDY, max_tokens=3, ignore_eos=True))
    setup.step()
    setup.step()
    aborted = setup.engine.abort("a")
    assert aborted is not None and not aborted.output().outputs[0].token_ids
    setup.run()
    assert len(only(setup, "b").token_ids) == 3


# -- aborts ---------------------------------------------------------------------------------------


def test_abort_in_flight_keeps_blocks_until_the_step_is_read() -> None:
    setup = make_setup(depth=1, num_blocks=4, block_size=4, max_num_seqs=2)
    (seq,) = setup.add("a", [1] * 9, SamplingParams(**GREEDY, max_tokens=9, ignore_eos=True))
    setup.step()
    setup.step()
    state = setup.engine.abort("a")
    assert state is not None and state.output().outputs[0].finish_reason == "abort"
    assert state.output().outputs[0].token_ids == setup.device.history[seq.seq_id][9:10]
    manager = setup.scheduler.block_manager
    assert manager.num_used == 3 and seq.status is Status.FINISHED
    assert setup.engine.abort("a") is None  # and a second time is no error
    # A newcomer may not have the blocks yet: this step reads the last one of `a`.
    setup.add("b", [2] * 9, SamplingParams(**GREEDY, max_tokens=2, ignore_eos=True))
    setup.step()
    assert manager.num_used == 0 and not setup.engine.in_flight
    setup.run()
    assert len(only(setup, "b").token_ids) == 2


@pytest.mark.parametrize("steps", range(8))
def test_abort_at_every_moment(steps: int) -> None:
    """Waiting, half prefilled, decoding, several samples: the rest is untouched."""
    setup = make_setup(depth=1, num_blocks=9, budget=4, max_num_seqs=3)
    params = SamplingParams(**GREEDY, n=2, max_tokens=5, ignore_eos=True)
    setup.add("a", [1] * 9, params)
    setup.add("b", [1] * 9, params)
    for _ in range(steps):
        setup.step()
    setup.engine.abort("a")
    setup.check()
    setup.run()
    assert [len(o.token_ids) for o in setup.outputs["b"].outputs] == [5, 5]
    reference = make_setup(depth=0, num_blocks=30)
    reference.add("b", [1] * 9, params)
    reference.run()
    expected = [o.token_ids for o in reference.outputs["b"].outputs]
    assert [o.token_ids for o in setup.outputs["b"].outputs] == expected


def test_drain_reads_what_is_in_flight() -> None:
    setup = make_setup(depth=1)
    setup.add("a", [1, 2], SamplingParams(**GREEDY, max_tokens=5, ignore_eos=True))
    setup.step()
    setup.engine.abort("a")
    setup.engine.drain()
    setup.check_empty()


# -- preemption -----------------------------------------------------------------------------------


def test_preempted_in_flight_queues_again_when_its_step_is_read() -> None:
    setup = make_setup(depth=1, num_blocks=9)
    params = SamplingParams(**GREEDY, max_tokens=6, ignore_eos=True)
    (seq,) = setup.add("a", [1] * 5, params)
    for _ in range(3):
        setup.step()
    table, epoch = list(seq.block_table), seq.epoch
    assert seq.steps_in_flight == 1
    setup.scheduler.preempt(seq)
    assert seq.status is Status.PREEMPTED and seq.block_table == table
    assert seq.seq_id in setup.scheduler.draining and not setup.scheduler.waiting
    assert setup.scheduler.schedule() is None  # nothing can be planned for it
    known = len(seq.token_ids)
    setup.step()
    assert seq.status is Status.WAITING and not seq.block_table and seq.epoch == epoch + 1
    assert len(seq.token_ids) == known + 1  # the token in flight counts
    setup.run()
    reference = make_setup(depth=0)
    reference.add("a", [1] * 5, params)
    reference.run()
    assert only(setup, "a").token_ids == only(reference, "a").token_ids


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_small_pool_preempts_the_newest_first(depth: int, prefix_cache: bool) -> None:
    setup = make_setup(
        depth=depth, num_blocks=6, block_size=2, max_num_seqs=3, prefix_cache=prefix_cache
    )
    preempted: list[int] = []
    preempt = setup.scheduler.preempt

    def recording(seq) -> None:
        newest = next(reversed(setup.scheduler.running))
        assert seq.seq_id == newest
        preempted.append(seq.seq_id)
        preempt(seq)

    setup.scheduler.preempt = recording
    params = SamplingParams(**GREEDY, max_tokens=8, ignore_eos=True)
    for number in range(3):
        setup.add(str(number), [number + 1] * 3, params)
    setup.run()
    assert preempted and 0 not in preempted
    assert setup.engine.stats.preemptions == len(preempted)
    assert all(len(only(setup, str(number)).token_ids) == 8 for number in range(3))


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_sequences_queue_in_the_order_they_came(depth: int) -> None:
    """First come, first served: two that are preempted together come back oldest first."""
    setup = make_setup(depth=depth, num_blocks=20, max_num_seqs=4)
    params = SamplingParams(**GREEDY, max_tokens=9, ignore_eos=True)
    seqs = [setup.add(str(number), [number + 1] * 3, params)[0] for number in range(3)]
    for _ in range(3):
        setup.step()
    setup.scheduler.preempt(seqs[2])
    setup.scheduler.preempt(seqs[1])
    while setup.scheduler.draining:
        plan, ticket = setup.engine.in_flight.popleft()
        setup.engine._take_in(plan, setup.runner.collect(ticket))
    assert [seq.seq_id for seq in setup.scheduler.waiting] == [1, 2]
    setup.run()


# -- prefix cache ---------------------------------------------------------------------------------


def test_blocks_are_findable_only_when_their_step_has_been_read() -> None:
    setup = make_setup(depth=1, num_blocks=12, max_num_seqs=3)
    manager = setup.scheduler.block_manager
    params = SamplingParams(**GREEDY, max_tokens=6, ignore_eos=True)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    (first,) = setup.add("a", prompt, params)
    setup.step()
    assert manager.match(prompt) == []  # launched, not done
    (second,) = setup.add("b", prompt, params)
    setup.step()  # b is planned before a's step is read: it computes everything itself
    assert second.num_cached_tokens == 0
    assert manager.match(prompt) == first.block_table[:2]
    (third,) = setup.add("c", prompt, params)
    setup.step()
    assert third.num_cached_tokens == 8 and third.block_table[:2] == first.block_table[:2]
    setup.run()
    assert len({tuple(only(setup, name).token_ids) for name in "abc"}) == 1


def test_generated_blocks_are_registered_once_their_tokens_are_known() -> None:
    for depth in (0, 1):
        setup = make_setup(depth=depth, num_blocks=12)
        (seq,) = setup.add("a", [1], SamplingParams(**GREEDY, max_tokens=9, ignore_eos=True))
        manager = setup.scheduler.block_manager
        while setup.engine.has_unfinished:
            setup.step()
            found = len(manager.match(seq.token_ids)) * 4
            assert found <= len(seq.token_ids)
        # 9 of 10 tokens were computed: two full blocks.
        assert len(manager.match(seq.token_ids)) == 2


def test_the_dropped_token_is_never_cached() -> None:
    """EOS completes a block's content early; the extra row writes behind it, unregistered."""
    setup = make_setup(depth=1, num_blocks=12)
    (seq,) = setup.add("a", [1, 2], SamplingParams(**GREEDY, max_tokens=9))
    script(setup, {seq.seq_id: [5, EOS, 6]})
    setup.run()
    manager = setup.scheduler.block_manager
    assert manager.match([1, 2, 5, EOS]) != []  # stored by the extra row, and known
    setup = make_setup(depth=1, num_blocks=12)
    (seq,) = setup.add("a", [1], SamplingParams(**GREEDY, max_tokens=9))
    script(setup, {seq.seq_id: [5, EOS, 6]})
    setup.run()
    assert len(setup.scheduler.block_manager.cached) == 0  # 1, 5, EOS and a token nobody has


# -- n > 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_wait_for_the_prompt_and_share_it(depth: int) -> None:
    setup = make_setup(depth=depth, num_blocks=12, budget=4, max_num_seqs=4)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=3, ignore_eos=True)
    seqs = setup.add("a", [1] * 9, params)
    leader, *followers = seqs
    while leader.num_computed < 9 or leader.num_tokens == 9 or not leader.completion_ids:
        setup.step()
        assert all(not seq.block_table for seq in followers if not leader.completion_ids)
    setup.run()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8, 8]
    assert len({tuple(o.token_ids) for o in setup.outputs["a"].outputs}) == 3
    assert setup.engine.stats.cached_tokens == 16


def test_samples_of_a_leader_that_ends_at_once() -> None:
    for depth in (0, 1):
        setup = make_setup(depth=depth, num_blocks=12)
        seqs = setup.add("a", [1] * 5, SamplingParams(temperature=1.0, n=3, max_tokens=4))
        script(setup, {seqs[0].seq_id: [EOS], seqs[1].seq_id: [5, EOS]})
        setup.run()
        lengths = [len(o.token_ids) for o in setup.outputs["a"].outputs]
        assert lengths == [1, 2, 4]


def test_samples_of_a_leader_preempted_before_its_prompt_is_done() -> None:
    setup = make_setup(depth=1, num_blocks=12, budget=4)
    seqs = setup.add("a", [1] * 9, SamplingParams(temperature=1.0, n=2, max_tokens=4))
    setup.step()
    setup.scheduler.preempt(seqs[0])
    setup.run()
    assert len(setup.outputs["a"].outputs) == 2


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [0, 1])
def test_failure_leaves_the_engine_empty(
    depth: int, at: int, where: str, error: BaseException
) -> None:
    setup = make_setup(depth=depth, num_blocks=8, budget=6, max_num_seqs=3)
    params = SamplingParams(**GREEDY, n=2, max_tokens=6, ignore_eos=True)
    for number in range(3):
        setup.add(str(number), [number + 1] * 7, params)
    getattr(setup.runner, f"fail_{where}")[at] = error
    with pytest.raises(type(error)):
        while setup.engine.has_unfinished:
            setup.step()
    setup.check_empty()
    assert not setup.runner.in_flight, "a step in flight was not drained"
    # Usable, and what it says is right: cached blocks of the failed run hold what they say.
    setup.add("again", [1] * 7, params)
    setup.run()
    reference = make_setup(depth=0, num_blocks=20)
    reference.add("again", [1] * 7, params)
    reference.run()
    expected = [o.token_ids for o in reference.outputs["again"].outputs]
    assert [o.token_ids for o in setup.outputs["again"].outputs] == expected


def test_a_second_failure_while_draining() -> None:
    """Both steps in flight are lost with the device: the first error is what the user sees."""
    setup = make_setup(depth=1)
    setup.add("a", [1, 2], SamplingParams(**GREEDY, max_tokens=6, ignore_eos=True))
    setup.runner.fail_collect = {1: RuntimeError("first"), 2: RuntimeError("second")}
    with pytest.raises(RuntimeError, match="first"):
        setup.run()
    setup.check_empty()


def test_an_interrupt_while_draining() -> None:
    """Ctrl-C pressed twice: the engine is empty all the same."""
    setup = make_setup(depth=1)
    setup.add("a", [1, 2], SamplingParams(**GREEDY, max_tokens=6, ignore_eos=True))
    setup.runner.fail_collect = {1: KeyboardInterrupt(), 2: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        setup.run()
    setup.check_empty()
    setup.add("b", [1, 2], SamplingParams(**GREEDY, max_tokens=6, ignore_eos=True))
    setup.run()


def test_reset_drops_requests_and_steps() -> None:
    setup = make_setup(depth=1, budget=4)
    params = SamplingParams(**GREEDY, n=2, max_tokens=6)
    for number in range(4):
        setup.add(str(number), [number + 1] * 5, params)
    setup.step()
    setup.step()
    setup.engine.reset()
    setup.check_empty()
    setup.engine.reset()  # with nothing to drop
    setup.check_empty()


# -- a scheduler that is not ours -----------------------------------------------------------------


def test_a_scheduler_that_plans_nothing_is_named() -> None:
    setup = make_setup(depth=1)
    setup.add("a", [1, 2], SamplingParams(**GREEDY))
    setup.scheduler.schedule = lambda: None
    with pytest.raises(RuntimeError, match="plans none"):
        setup.run()
    setup.check_empty()


def test_a_plan_beyond_its_blocks_is_named() -> None:
    setup = make_setup(depth=1)
    setup.add("a", [1] * 9, SamplingParams(**GREEDY))
    setup.scheduler.block_manager.blocks_needed = lambda tokens: -(-tokens // 4)
    schedule = setup.scheduler.schedule

    def short():
        plan = schedule()
        plan.rows[0].block_table.pop()
        return plan

    setup.scheduler.schedule = short
    with pytest.raises(RuntimeError, match="sequence 0 .* 2 blocks; it needs 3"):
        setup.step()
    setup.check_empty()
