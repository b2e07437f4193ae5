"""A runner that is late on purpose, and a device on which wrong sharing cannot hide.

`AsyncRunner` stands between the engine and something that computes. A launch only takes a deep copy
of the plan; the work is done when the step is collected (or, with late=False, when the next launch
needs its token), strictly in order. It fails loudly where the host uses what it cannot know yet.
`ContentDevice` computes no attention: a slot of its cache holds a digest of the whole history up to
its token, and every row checks that what it reads through its block table is its own history.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable

from minivllm.engine.scheduler import Scheduler
from minivllm.engine.step_plan import ScheduledRow, StepPlan, StepResult, TokenLogprobs

EOS = 0


class Ticket:
    """A launched step: the engine's own plan, its bytes at launch, its result once computed."""

    def __init__(self, plan: StepPlan) -> None:
        self.original = plan
        self.image = pickle.dumps(plan)
        self.plan: StepPlan = pickle.loads(self.image)
        self.result: StepResult | None = None


class AsyncRunner:
    """Runs plans late and in order on `device`, an object with `arrive(plan)` and `execute(plan)`.

    scheduler: where given, its blocks are checked against the steps in flight at every launch.
    fail_launch, fail_collect: raise this at the n-th call (counted from 1).
    """

    def __init__(
        self, device: ContentDevice | ModelDevice, block_size: int, *, late: bool = True
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.late = late
        self.in_flight: deque[Ticket] = deque()
        self.scheduler: Scheduler | None = None
        self.launches = self.collects = self.max_in_flight = 0
        self.fail_launch: dict[int, BaseException] = {}
        self.fail_collect: dict[int, BaseException] = {}

    def launch(self, plan: StepPlan) -> Ticket:
        """Take a copy of the plan; compute nothing that can wait."""
        self.launches += 1
        if self.launches in self.fail_launch:
            raise self.fail_launch[self.launches]
        unread = self._check_tokens(plan)
        self._check_reuse(plan)
        self.device.arrive(plan)
        if unread and not self.late:
            self._compute_all()
        ticket = Ticket(plan)
        self.in_flight.append(ticket)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        self.check_host()
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """Compute the step now, if nothing has forced it before."""
        self.collects += 1
        assert ticket is self.in_flight[0], "steps must be read in the order of their launches"
        try:
            assert pickle.dumps(ticket.original) == ticket.image, "a plan in flight was changed"
            self.check_host()
            failure = self.fail_collect.get(self.collects)
            if failure is not None:
                raise failure
            if ticket.result is None:
                ticket.result = self.device.execute(ticket.plan)
            return ticket.result
        finally:
            self.in_flight.popleft()

    def check_host(self) -> None:
        """Blocks of a step in flight still belong to the sequences that the step computes."""
        if self.scheduler is None:
            return
        manager = self.scheduler.block_manager
        for ticket in self.in_flight:
            for row in ticket.plan.rows:
                seq = self.scheduler.sequences.get(row.seq_id)
                assert seq is not None, f"sequence {row.seq_id} was released with a step in flight"
                count = len(row.block_table)
                assert seq.block_table[:count] == row.block_table, "blocks moved while in flight"
                for block in row.block_table:
                    assert block not in manager.free_blocks, f"block {block} is in flight and free"

    def _check_tokens(self, plan: StepPlan) -> bool:
        """A token being sampled is left to the device; all others come with the plan."""
        sampling = {
            (row.seq_id, row.end)
            for ticket in self.in_flight
            for row in ticket.plan.rows
            if row.sampling is not None
        }
        unread = False
        for row in plan.rows:
            stop = row.start + len(row.token_ids)
            early = [p for p in range(row.start, stop) if (row.seq_id, p) in sampling]
            assert not early, f"sequence {row.seq_id}: token {early} is not known to the host yet"
            if stop < row.end:
                assert stop == row.end - 1, f"sequence {row.seq_id}: more than one token missing"
                assert (row.seq_id, stop) in sampling, f"nobody is sampling token {stop}"
                unread = True
        return unread

    def _check_reuse(self, plan: StepPlan) -> None:
        """What this step writes, no other sequence in flight may hold."""
        size = self.block_size
        for row in plan.rows:
            written = set(row.block_table[row.start // size : -(-row.end // size)])
            others = [
                other
                for rows in [plan.rows, *(ticket.plan.rows for ticket in self.in_flight)]
                for other in rows
                if (other.seq_id, other.epoch) != (row.seq_id, row.epoch)
            ]
            for other in others:
                shared = written & set(other.block_table)
                assert not shared, f"blocks {shared} of {other.seq_id} written by {row.seq_id}"

    def _compute_all(self) -> None:
        for ticket in self.in_flight:
            if ticket.result is None:
                ticket.result = self.device.execute(ticket.plan)


class ModelDevice:
    """The real model runner, computing when it is told to."""

    def __init__(self, runner: object) -> None:
        self.runner = runner

    def arrive(self, plan: StepPlan) -> None:
        """Nothing to check at launch."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch and read at once."""
        return self.runner.collect(self.runner.launch(plan))


class ContentDevice:
    """A cache of digests and a next token that depends on all of them.

    `add(seq_id, prompt)` tells it what each sequence really is; what it generates it knows itself.
    eos_every: about one token in so many is EOS; 0 is never.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, vocab: int = 7, eos_every: int = 0
    ) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.eos_every = eos_every
        # None: never written. A digest stays until it is overwritten, as bytes in memory do.
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.history: dict[int, list[int]] = {}
        self.last_token: dict[int, int] = {}
        self.rows_checked = self.hits_checked = 0
        self.token_rule: Callable[[int, ScheduledRow], int] | None = None
        self._chains: dict[int, list[int]] = {}
        self._seen: set[tuple[int, int]] = set()

    def add(self, seq_id: int, prompt: list[int]) -> None:
        """A sequence whose rows may come."""
        self.history[seq_id] = list(prompt)
        self._chains[seq_id] = []

    def arrive(self, plan: StepPlan) -> None:
        """At launch: a cached prefix must have been computed by steps that are already read."""
        for row in plan.rows:
            if (row.seq_id, row.epoch) in self._seen:
                continue
            self._seen.add((row.seq_id, row.epoch))
            if row.start:
                self.hits_checked += 1
                self._check_content(row, row.start)

    def execute(self, plan: StepPlan) -> StepResult:
        """Store all rows, then let each read back its history and draw a token."""
        for row in plan.rows:
            tokens = list(row.token_ids)
            if len(tokens) < row.num_tokens:
                tokens.append(self.last_token[row.seq_id])
            own = self.history[row.seq_id][row.start : row.end]
            assert tokens == own, f"sequence {row.seq_id} computes {tokens}, its text is {own}"
            chain = self._chain(row.seq_id, row.end)
            for position in range(row.start, row.end):
                block = row.block_table[position // self.block_size]
                self.slots[block][position % self.block_size] = chain[position]
        result = StepResult([], [], [])
        for row in plan.rows:
            self._check_content(row, row.end)
            self.rows_checked += 1
            result.token_ids.append(None if row.sampling is None else self._draw(row))
            result.logprobs.append(self._logprobs(row))
            result.prompt_logprobs.append(self._prompt_logprobs(row))
        return result

    def _chain(self, seq_id: int, length: int) -> list[int]:
        """Digests of the first 1, 2, ... `length` tokens."""
        chain = self._chains[seq_id]
        for token in self.history[seq_id][len(chain) : length]:
            chain.append(hash((chain[-1] if chain else 12345, token)))
        return chain

    def _read(self, row: ScheduledRow, position: int) -> int | None:
        block = row.block_table[position // self.block_size]
        return self.slots[block][position % self.block_size]

    def _check_content(self, row: ScheduledRow, length: int) -> None:
        chain = self._chain(row.seq_id, length)
        for position in range(length):
            assert self._read(row, position) == chain[position], (
                f"sequence {row.seq_id} (epoch {row.epoch}) reads foreign content at {position}"
            )

    def _draw(self, row: ScheduledRow) -> int:
        sampling, history = row.sampling, self.history[row.seq_id]
        assert sampling is not None and sampling.position == row.end == len(history)
        digest = hash((self._read(row, row.end - 1), sampling.seed, sampling.sample_index))
        if self.token_rule is not None:
            token = self.token_rule(digest, row)
        elif self.eos_every and digest // 1000 % self.eos_every == 0:
            token = EOS
        else:
            token = 1 + digest % (self.vocab - 1)
        history.append(token)
        self.last_token[row.seq_id] = token
        return token

    def _logprobs(self, row: ScheduledRow) -> TokenLogprobs | None:
        if row.sampling is None or row.sampling.logprobs is None:
            return None
        return self._entry(self.history[row.seq_id], row.end, row.sampling.logprobs)

    def _prompt_logprobs(self, row: ScheduledRow) -> list[TokenLogprobs]:
        asked = row.prompt_logprobs
        if asked is None:
            return []
        history, first = self.history[row.seq_id], row.start + 1
        assert asked.targets == history[first : first + len(asked.targets)]
        return [self._entry(history, first + i, asked.count) for i in range(len(asked.targets))]

    def _entry(self, history: list[int], position: int, count: int) -> TokenLogprobs:
        """A number that belongs to the history up to `position`, and to nothing else."""
        token, value = history[position], -(hash(tuple(history[: position + 1])) % 997) / 100
        ids = [token, *(t for t in range(self.vocab) if t != token)][:count]
        return TokenLogprobs(token, value, 1, ids, [value - i for i in range(len(ids))])
