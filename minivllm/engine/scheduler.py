"""Which sequences run in the next step, and how many tokens of each.

Owns the queues and the budget: continuous batching (Orca, Yu et al., 2022), chunked prefill
(Sarathi, Agrawal et al., 2023), preemption by recomputation. Never imports torch or sees a tensor:
it says what to compute by a `StepPlan` and is told the tokens by `complete`. Lessons 10 and 11.

A step may still be in flight while the next one is planned. Three rules make that safe:
planning counts tokens in flight as if they were known; blocks and seats of a sequence that has
ended or was preempted are given up only when its last launched step has been read (it is
`draining` until then); a token that arrives for a sequence that has ended is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from itertools import takewhile

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence, Status
from minivllm.engine.step_plan import ScheduledRow, StepPlan


class Scheduler:
    """Plans steps over a token budget; first come, first served; preempts the newest first."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.sequences: dict[int, Sequence] = {}  # all that are not released yet
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by admission, oldest first
        self.draining: dict[int, Sequence] = {}  # ended or preempted, with a step in flight
        self.parked: dict[int, list[Sequence]] = {}  # leader's id -> samples waiting for its prompt
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    # -- requests ---------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its limits must have been checked: prompt + 1 token fits the pool."""
        capacity = self.block_manager.num_blocks * self.block_manager.block_size
        # The last token is only reported, never stored: it needs no slot in the cache.
        seq.max_total = min(self.max_model_len, capacity + 1)
        seq.limit_reason = "kv_capacity" if capacity + 1 < self.max_model_len else None
        wanted = seq.params.max_tokens
        if wanted is not None and seq.prompt_len + wanted <= seq.max_total:
            seq.max_total, seq.limit_reason = seq.prompt_len + wanted, None
        self.sequences[seq.seq_id] = seq
        leader = seq.leader
        if leader is not None and not leader.finished and leader.num_computed < leader.prompt_len:
            self.parked.setdefault(leader.seq_id, []).append(seq)
        else:
            self.waiting.append(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence wherever it stands; a second call is a no-op."""
        if seq.finished:
            return
        if seq.status is Status.WAITING:
            parked = self.parked.get(seq.leader.seq_id, []) if seq.leader else []
            (parked if seq in parked else self.waiting).remove(seq)
        self.running.pop(seq.seq_id, None)
        seq.status, seq.finish_reason, seq.stop_reason = Status.FINISHED, reason, stop_reason
        self._unpark(seq)
        self._release_or_drain(seq)

    def abort_all(self, broken: bool = False) -> None:
        """Drop every sequence, also those of steps that will never be read.

        broken: a change was interrupted half-way (Ctrl-C strikes between any two lines), so neither
        queues nor reference counts can be trusted: the block manager starts afresh.
        """
        live = list(self.sequences.values())
        for queue in (self.sequences, self.waiting, self.running, self.draining, self.parked):
            queue.clear()
        for seq in live:
            seq.steps_in_flight = seq.num_pending = 0
            if not seq.finished:
                seq.status, seq.finish_reason = Status.FINISHED, "abort"
            if broken:
                seq.block_table.clear()
            else:
                self.block_manager.free(seq)
        if broken:
            self.block_manager.rebuild()

    @property
    def has_unfinished(self) -> bool:
        """True while any sequence has work left or a step to be read."""
        return bool(self.sequences)

    # -- planning ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None where nothing can run before a step in flight is read."""
        if self.enable_chunked_prefill:
            decodes = self.grow_or_preempt()
            prefills = self._prefilling()
            admitted = self.admit(self._budget_left(decodes, prefills))
            # A preempted one may find all but its newest token cached: it decodes right away.
            decodes += [seq for seq in admitted if seq.in_decode]
            prefills += [seq for seq in admitted if not seq.in_decode]
        else:  # two phases, prefill first: whole prompts alone, or decode alone
            self.admit(self._budget_left([], self._prefilling()))
            prefills = self._prefilling()
            decodes = [] if prefills else self.grow_or_preempt()
        chunks = self.split_budget(decodes, prefills)
        return self._plan(chunks, len(decodes)) if chunks else None

    def grow_or_preempt(self) -> list[Sequence]:
        """Find a slot for the newest token of every decoding sequence, oldest first.

        Where the pool is exhausted the newest sequence gives up its blocks and queues again.
        Returns the sequences that can decode in this step.
        """
        ready: list[Sequence] = []
        for seq in list(self.running.values()):
            if seq.status is not Status.RUNNING or not seq.in_decode or seq.at_limit:
                continue
            while not self.block_manager.can_append(seq):
                if self._blocks_on_the_way():
                    break  # sit this step out; nobody needs to be preempted
                victim = next(reversed(self.running.values()))
                self.preempt(victim)
                if victim is seq:
                    break
            else:
                self.block_manager.append(seq)
                ready.append(seq)
        return ready

    def admit(self, budget: int) -> list[Sequence]:
        """Move waiting sequences to running while there are seats, blocks and tokens to compute.

        budget: tokens that this step can still take. Returns the sequences admitted.
        """
        admitted: list[Sequence] = []
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            # Seats count every sequence that holds blocks, not this step's picks (case K46).
            if len(self.running) + len(self.draining) >= self.max_num_seqs:
                break
            if not self.block_manager.can_allocate(seq):
                break
            if not self.enable_chunked_prefill and seq.num_uncomputed > budget:
                break
            self.waiting.popleft()
            seq.num_computed = self.block_manager.allocate(seq)
            seq.status = Status.RUNNING
            self.running[seq.seq_id] = seq
            if seq.epoch == 0:
                seq.num_cached_tokens = seq.num_computed
                self.num_cached_tokens += seq.num_computed
            budget -= seq.num_uncomputed
            admitted.append(seq)
        return admitted

    def split_budget(
        self, decodes: Seq[Sequence], prefills: Seq[Sequence]
    ) -> list[tuple[Sequence, int]]:
        """Share the token budget: one token to each decode, the rest to prompts in order.

        Decodes first, because a prompt can be cut and a decode cannot: a long prompt then slows its
        neighbours by a chunk a step instead of stopping them for its whole length.
        """
        chunks = [(seq, 1) for seq in decodes]
        budget = self.max_num_batched_tokens - len(chunks)
        for seq in prefills:
            count = min(seq.num_uncomputed, budget)
            if count > 0:
                chunks.append((seq, count))
                budget -= count
        return chunks

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it computes its tokens again when it is next admitted.

        Recomputing costs one prefill; swapping to host memory would move the same bytes twice.
        """
        del self.running[seq.seq_id]
        seq.status = Status.PREEMPTED
        seq.epoch += 1
        self.num_preemptions += 1
        self._release_or_drain(seq)

    def _prefilling(self) -> list[Sequence]:
        return [
            seq for seq in self.running.values() if not seq.in_decode and seq.num_uncomputed > 0
        ]

    def _budget_left(self, decodes: Seq[Sequence], prefills: Seq[Sequence]) -> int:
        """Tokens of this step that running sequences leave to newcomers."""
        return (
            self.max_num_batched_tokens - len(decodes) - sum(seq.num_uncomputed for seq in prefills)
        )

    def _blocks_on_the_way(self) -> bool:
        """True where reading a step in flight will free blocks."""
        return bool(self.draining) or any(seq.at_limit for seq in self.running.values())

    def _plan(self, chunks: Seq[tuple[Sequence, int]], num_decode: int) -> StepPlan:
        """Write the rows down and count them as launched."""
        rows: list[ScheduledRow] = []
        for seq, count in chunks:
            start, end = seq.num_computed, seq.num_computed + count
            samples = end == seq.num_tokens
            rows.append(
                ScheduledRow(
                    seq_id=seq.seq_id,
                    epoch=seq.epoch,
                    start=start,
                    end=end,
                    token_ids=seq.token_ids[start:end],
                    block_table=list(seq.block_table),
                    sampling=seq.row_sampling(end) if samples else None,
                    prompt_logprobs=seq.row_prompt_logprobs(start, end),
                )
            )
            seq.num_computed = end
            seq.num_pending += samples
            seq.steps_in_flight += 1
        return StepPlan(rows, num_decode)

    # -- results ----------------------------------------------------------------------------------

    def complete(self, plan: StepPlan, token_ids: Seq[int | None]) -> list[Sequence]:
        """Take in a step that has been read; returns the sequences that got a token by it.

        Ends sequences by token id and by length. A stop string is the caller's to find.
        """
        grown: list[Sequence] = []
        for row, token in zip(plan.rows, token_ids, strict=True):
            seq = self.sequences[row.seq_id]
            seq.steps_in_flight -= 1
            # Only now is the content certain to be in the cache.
            self.block_manager.register(seq, row.end)
            if row.end >= seq.prompt_len:
                self._unpark(seq)
            if row.sampling is not None:
                assert token is not None, f"sequence {seq.seq_id} is owed a token"
                seq.num_pending -= 1
                if not seq.finished:  # else it ended a step ago, and this token is one too many
                    seq.token_ids.append(token)
                    grown.append(seq)
                    self._check_end(seq)
            if seq.seq_id in self.draining and seq.steps_in_flight == 0:
                self._release(seq)
        return grown

    def _check_end(self, seq: Sequence) -> None:
        token = seq.token_ids[-1]
        if token in seq.eos_ids:
            self.finish(seq, "stop")
        elif token in seq.stop_ids:
            self.finish(seq, "stop", token)
        elif len(seq.token_ids) >= seq.max_total:
            self.finish(seq, "length", seq.limit_reason)

    def _unpark(self, leader: Sequence) -> None:
        followers = self.parked.pop(leader.seq_id, [])
        self.waiting.extendleft(reversed(followers))

    def _release_or_drain(self, seq: Sequence) -> None:
        if seq.steps_in_flight:
            self.draining[seq.seq_id] = seq
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Give blocks and seat back; a preempted sequence queues again, in front."""
        self.draining.pop(seq.seq_id, None)
        self.block_manager.free(seq)
        if seq.status is Status.PREEMPTED:
            seq.status = Status.WAITING
            seq.num_computed = 0
            # In front of all that never ran, but behind older ones that were preempted: those whose
            # steps are read together come here in the order of the rows, not of their preemption.
            older = takewhile(lambda s: s.epoch and s.seq_id < seq.seq_id, self.waiting)
            self.waiting.insert(sum(1 for _ in older), seq)
        else:
            del self.sequences[seq.seq_id]
