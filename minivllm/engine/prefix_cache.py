"""Blocks that outlive their sequence, found again by their content.

Owns the index from content to block and the order in which cached blocks are given up. Never finds
a block before the step that filled it is done. Lesson 12.

A full block is known by a hash chained over its prefix, and a hash is only a hint: a look-up
compares the tokens and the identity of the parent, so a collision costs a miss, never foreign text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

import numpy as np
import xxhash

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence

ROOT = 0  # the parent of a first block, both as a hash and as an identity


def block_hash(tokens: Seq[int], parent: int) -> int:
    """Hash of a full block: xxh64 over the parent's hash and the token ids.

    Chained, because K and V depend on every token before them: equal blocks after different
    prefixes are different content.
    """
    prefix = parent.to_bytes(8, "little")
    return xxhash.xxh64_intdigest(prefix + np.asarray(tokens, dtype=np.int64).tobytes())


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """Content of a registered block. `identity` is never reused, so a parent cannot be confused."""

    identity: int
    parent: int  # identity of the block before it
    hash: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Chain:
    """How far a sequence's blocks are registered: number of blocks, last hash, last identity."""

    length: int = 0
    hash: int = ROOT
    identity: int = ROOT


class PrefixCache(BlockManager):
    """A block manager that shares full blocks and keeps their content until the space is needed.

    Free blocks stand in `free_blocks` in the order they will be taken: first those without cached
    content, then cached ones, least recently given up first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.index: dict[int, int] = {}  # hash -> block
        self.cached: dict[int, CachedBlock] = {}  # block -> its content
        self.chains: dict[int, Chain] = {}  # seq_id -> how far it is registered
        self._identities = count(ROOT + 1)

    def match(self, token_ids: Seq[int]) -> list[int]:
        """Blocks that already hold the longest cached prefix of `token_ids`."""
        blocks: list[int] = []
        parent_hash, parent = ROOT, ROOT
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            tokens = tuple(token_ids[start : start + self.block_size])
            parent_hash = block_hash(tokens, parent_hash)
            block = self.index.get(parent_hash)
            if block is None:
                break
            content = self.cached[block]
            if content.tokens != tokens or content.parent != parent:
                break
            parent = content.identity
            blocks.append(block)
        return blocks

    def _match_sequence(self, seq: Sequence) -> list[int]:
        # At least one token is always computed: its logits are what the next token is drawn from.
        # Prompt log-probabilities need every position's logits, so such a request never looks up.
        if seq.wants_prompt_logprobs:
            return []
        return self.match(seq.token_ids[: seq.num_tokens - 1])

    def can_allocate(self, seq: Sequence) -> bool:
        """True where there are enough blocks; shared ones that somebody holds cost nothing."""
        needed = self.blocks_needed(seq.num_tokens)
        if needed <= self.num_free:
            return True  # the usual case needs no look-up
        shared = [block for block in self._match_sequence(seq) if self.ref_counts[block] > 0]
        return needed - len(shared) <= self.num_free

    def allocate(self, seq: Sequence) -> int:
        """Share the cached prefix, take new blocks for the rest; returns the tokens shared."""
        matched = self._match_sequence(seq)
        for block in matched:
            if self.ref_counts[block] == 0:
                del self.free_blocks[block]
            self.ref_counts[block] += 1
        seq.block_table.extend(matched)
        self.append(seq)
        if matched:
            last = self.cached[matched[-1]]
            self.chains[seq.seq_id] = Chain(len(matched), last.hash, last.identity)
        return len(matched) * self.block_size

    def register(self, seq: Sequence, num_stored: int) -> None:
        """Make the blocks that a finished step has filled findable, generated ones included."""
        chain = self.chains.get(seq.seq_id)
        if chain is None:
            chain = self.chains[seq.seq_id] = Chain()
        full = min(num_stored, len(seq.token_ids)) // self.block_size
        while chain.length < full:
            start = chain.length * self.block_size
            tokens = tuple(seq.token_ids[start : start + self.block_size])
            self._register_block(seq.block_table[chain.length], tokens, chain)

    def _register_block(self, block: int, tokens: tuple[int, ...], chain: Chain) -> None:
        """Index one block, or find that equal content is indexed already; advance the chain."""
        digest = block_hash(tokens, chain.hash)
        known = self.index.get(digest)
        content = None if known is None else self.cached[known]
        if content is None or content.tokens != tokens or content.parent != chain.identity:
            if known is not None:  # a collision, or a chain whose parent was evicted: replace it
                self._forget(known)
            content = CachedBlock(next(self._identities), chain.identity, digest, tokens)
            self.index[digest] = block
            self.cached[block] = content
        chain.length, chain.hash, chain.identity = chain.length + 1, digest, content.identity

    def free(self, seq: Sequence) -> None:
        """Give up a sequence's blocks; full ones stay findable until they are needed."""
        super().free(seq)
        self.chains.pop(seq.seq_id, None)

    def release(self, block: int) -> None:
        """Queue a free block: behind all others if its content is worth keeping, else in front."""
        self.free_blocks[block] = None
        if block not in self.cached:
            self.free_blocks.move_to_end(block, last=False)

    def reset(self) -> None:
        """Forget all cached content (blocks in use stay with their sequences)."""
        for block in list(self.cached):
            self._forget(block)

    def rebuild(self) -> None:
        """Start afresh: what an interrupted step has left in the cache is not to be trusted."""
        super().rebuild()
        for table in (self.index, self.cached, self.chains):
            table.clear()

    def _take(self) -> int:
        block = super()._take()
        self._forget(block)  # from here on it will hold something else (case K30)
        return block

    def _forget(self, block: int) -> None:
        content = self.cached.pop(block, None)
        if content is not None:
            del self.index[content.hash]

    def check(self, sequences: list[Sequence]) -> None:
        """The base invariants, and: index and content agree entry by entry."""
        super().check(sequences)
        assert len(self.index) == len(self.cached)
        for digest, block in self.index.items():
            assert self.cached[block].hash == digest, block
