"""An engine over the fake device, and the invariants that hold after every step of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from async_runner import EOS, AsyncRunner, ContentDevice

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.output_processor import RequestState
from minivllm.engine.prefix_cache import ROOT, PrefixCache
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence, Status
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams


@dataclass
class Setup:
    """The parts of one engine and what has come out of it."""

    engine: Engine
    scheduler: Scheduler
    runner: AsyncRunner
    device: ContentDevice
    steps: int = 0
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def add(
        self, request_id: str, prompt: list[int], params: SamplingParams, seed: int = 0
    ) -> list[Sequence]:
        """Queue a request and tell the device what its sequences are; returns them."""
        self.engine.add_request(request_id, None, prompt, params, seed)
        seqs = [sample.seq for sample in self.engine.requests[request_id].samples]
        for seq in seqs:
            self.device.add(seq.seq_id, prompt)
        return seqs

    def step(self) -> list[RequestState]:
        """One engine step, the invariants checked after it."""
        changed = self.engine.step()
        self.steps += 1
        for state in changed:
            if state.finished:
                self.outputs[state.request_id] = state.output()
        self.check()
        return changed

    def run(self, bound: int = 10_000) -> dict[str, RequestOutput]:
        """Step until nothing is left; more than `bound` steps are a livelock."""
        first = self.steps
        while self.engine.has_unfinished:
            assert self.steps - first < bound, f"no end after {bound} steps"
            self.step()
        self.check_empty()
        return self.outputs

    def check(self) -> None:
        """Everything that must hold between two steps."""
        check_scheduler(self.scheduler)
        self.runner.check_host()

    def check_empty(self) -> None:
        """Nothing waits, runs or is held any more."""
        scheduler = self.scheduler
        assert not scheduler.sequences and not scheduler.has_unfinished
        assert not scheduler.waiting and not scheduler.running
        assert not scheduler.draining and not scheduler.parked
        assert scheduler.block_manager.num_used == 0
        assert all(count == 0 for count in scheduler.block_manager.ref_counts)
        assert not self.engine.requests and not self.engine.in_flight
        assert not self.engine._owner
        scheduler.block_manager.check([])
        if isinstance(scheduler.block_manager, PrefixCache):
            assert not scheduler.block_manager.chains


def make_setup(
    *,
    num_blocks: int = 8,
    block_size: int = 4,
    depth: int = 1,
    prefix_cache: bool = True,
    chunked: bool = True,
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 64,
    late: bool = True,
    eos_every: int = 0,
    tokenizer: Any = None,
) -> Setup:
    """An engine over a ContentDevice behind an AsyncRunner."""
    manager_class = PrefixCache if prefix_cache else BlockManager
    scheduler = Scheduler(
        manager_class(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
    )
    device = ContentDevice(num_blocks, block_size, eos_every=eos_every)
    runner = AsyncRunner(device, block_size, late=late)
    runner.scheduler = scheduler
    engine = Engine(
        scheduler,
        runner,
        tokenizer,
        eos_ids=frozenset({EOS}),
        share_prompts=prefix_cache,
        depth=depth,
    )
    return Setup(engine, scheduler, runner, device)


def check_scheduler(scheduler: Scheduler) -> None:
    """The invariants of cases K30, K39 and K46 over all sequences that exist."""
    live = list(scheduler.sequences.values())
    manager = scheduler.block_manager
    manager.check(live)
    assert len(manager.free_blocks) + manager.num_used == manager.num_blocks
    check_index(manager)
    check_sharing(live, manager)
    holders = [seq for seq in live if seq.block_table]
    assert len(holders) <= scheduler.max_num_seqs
    assert len(scheduler.running) + len(scheduler.draining) <= scheduler.max_num_seqs
    check_places(scheduler)


def check_places(scheduler: Scheduler) -> None:
    """Every sequence stands in exactly one place, and that place fits its status and counters."""
    parked = [seq for seqs in scheduler.parked.values() for seq in seqs]
    places = [
        *scheduler.waiting,
        *scheduler.running.values(),
        *scheduler.draining.values(),
        *parked,
    ]
    assert sorted(seq.seq_id for seq in places) == sorted(scheduler.sequences)
    for seq in (*scheduler.waiting, *parked):
        assert seq.status is Status.WAITING and not seq.block_table
        assert seq.steps_in_flight == seq.num_pending == seq.num_computed == 0
    for seq in scheduler.running.values():
        assert seq.status is Status.RUNNING and seq.block_table
        assert seq.num_computed <= seq.num_tokens <= seq.max_total
        assert len(seq.block_table) >= manager_blocks(scheduler, seq.num_computed)
    for seq in scheduler.draining.values():
        assert seq.status in (Status.PREEMPTED, Status.FINISHED)
        assert seq.steps_in_flight > 0 and seq.block_table


def manager_blocks(scheduler: Scheduler, tokens: int) -> int:
    """Blocks of so many tokens, counted here by hand."""
    size = scheduler.block_manager.block_size
    return (tokens + size - 1) // size


def check_index(manager: BlockManager) -> None:
    """A hash is findable only while its block holds the tokens that were hashed."""
    if not isinstance(manager, PrefixCache):
        return
    for digest, block in manager.index.items():
        content = manager.cached[block]
        assert content.hash == digest and len(content.tokens) == manager.block_size
        assert content.identity != ROOT
    identities = [content.identity for content in manager.cached.values()]
    assert len(set(identities)) == len(identities)


def check_sharing(live: list[Sequence], manager: BlockManager) -> None:
    """Two tables hold one block only at one index, full, and behind the same tokens."""
    first: dict[int, tuple[Sequence, int]] = {}
    for seq in live:
        assert len(set(seq.block_table)) == len(seq.block_table)
        for index, block in enumerate(seq.block_table):
            other, at = first.setdefault(block, (seq, index))
            if other is seq:
                continue
            end = (index + 1) * manager.block_size
            assert at == index, f"block {block} at {at} and {index}"
            assert len(seq.token_ids) >= end and len(other.token_ids) >= end
            assert seq.token_ids[:end] == other.token_ids[:end]


def random_request(rng: random.Random, longest: int) -> tuple[list[int], SamplingParams, int]:
    """A prompt over few tokens and few beginnings, so that prefixes are shared; its parameters."""
    beginning = [rng.choice((1, 2)) for _ in range(rng.choice((0, 2)))] * rng.randrange(1, 6)
    prompt = (beginning + [rng.randrange(1, 4) for _ in range(rng.randrange(1, 8))])[:longest]
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3)),
        temperature=0,
        max_tokens=rng.choice((1, 2, 3, 5, 8, 13, 30, None)),
        stop_token_ids=rng.choice(([], [], [3])),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((None, None, None, 1)),
    )
    return prompt, params, rng.randrange(4)
