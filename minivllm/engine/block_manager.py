"""Who holds which block of the KV cache.

Owns block ids, the free list and the reference counts. Never touches a tensor: a block is a number
here. The prefix cache is a subclass (`prefix_cache.py`); this plain form never shares. Lesson 08.

Invariants, after every call:
| | |
|---|---|
| a block is free or referenced | `block in free` iff `ref_counts[block] == 0` |
| references are table entries | `ref_counts[block]` == number of tables that hold the block |
| tables are just long enough | ceil(num_tokens / block_size) blocks after allocate and append |
"""

from __future__ import annotations

from collections import OrderedDict

from minivllm.engine.sequence import Sequence


class BlockManager:
    """Blocks for sequences: whole prompts by `allocate`, then one at a time by `append`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        # An ordered set: taken from the front, and a block in the middle leaves in O(1), which the
        # prefix cache needs when it finds a free block whose content is still good.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that could be taken now."""
        return len(self.free_blocks)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_free

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence) -> bool:
        """True where `allocate(seq)` would find enough blocks."""
        return self.blocks_needed(seq.num_tokens) <= self.num_free

    def allocate(self, seq: Sequence) -> int:
        """Give a waiting sequence blocks for all its tokens; returns how many need no computing."""
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        for _ in range(self.blocks_needed(seq.num_tokens)):
            seq.block_table.append(self._take())
        return 0

    def can_append(self, seq: Sequence) -> bool:
        """True where the newest token has a slot, or a block can be had for it."""
        return self.blocks_needed(seq.num_tokens) - len(seq.block_table) <= self.num_free

    def append(self, seq: Sequence) -> None:
        """Make room for the newest token: a new block exactly when the last one is full."""
        while len(seq.block_table) < self.blocks_needed(seq.num_tokens):
            seq.block_table.append(self._take())

    def free(self, seq: Sequence) -> None:
        """Give up all blocks of a sequence. A second call finds an empty table: a no-op."""
        # Tail first: under a prefix cache the tail of a chain must be reused before its head.
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.release(block)
        seq.block_table.clear()

    def release(self, block: int) -> None:
        """Put a block that nobody holds any more on the free list."""
        self.free_blocks[block] = None

    def register(self, seq: Sequence, num_stored: int) -> None:
        """Told when a step is done: K and V of the first `num_stored` tokens are in the cache."""

    def reset(self) -> None:
        """Forget cached content, where there is any."""

    def rebuild(self) -> None:
        """Take every block back, whatever a failure has left. No sequence may hold one."""
        self.ref_counts = [0] * self.num_blocks
        self.free_blocks = OrderedDict.fromkeys(range(self.num_blocks))

    def _take(self) -> int:
        block, _ = self.free_blocks.popitem(last=False)
        self.ref_counts[block] = 1
        return block

    def check(self, sequences: list[Sequence]) -> None:
        """Assert the invariants above against all sequences that exist. For tests and idle time."""
        held = [block for seq in sequences for block in seq.block_table]
        for block in range(self.num_blocks):
            count = held.count(block)
            assert self.ref_counts[block] == count, (block, self.ref_counts[block], count)
            assert (block in self.free_blocks) == (count == 0), block
