"""The prefix cache: what is found, what is verified, what is given up first."""

from __future__ import annotations

import pytest

from minivllm.engine import prefix_cache
from minivllm.engine.prefix_cache import ROOT, PrefixCache, block_hash
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams

S = 4


class Life:
    """A cache and sequences that live in it."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, S)
        self.live: list[Sequence] = []
        self.made = 0

    def start(self, tokens: list[int], done: int | None = None, **fields) -> Sequence:
        """Allocate and compute `done` tokens (all of them unless given)."""
        self.made += 1
        seq = Sequence(self.made, tokens, SamplingParams(**fields))
        assert self.cache.can_allocate(seq)
        seq.num_computed = self.cache.allocate(seq)
        self.live.append(seq)
        self.cache.register(seq, len(tokens) if done is None else done)
        self.cache.check(self.live)
        return seq

    def end(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.cache.free(seq)
        self.cache.check(self.live)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_block_hash() -> None:
    """xxh64 over the parent and the ids: stable numbers, and every input counts."""
    import xxhash

    data = (5).to_bytes(8, "little") + b"".join(i.to_bytes(8, "little") for i in (1, 2, 3))
    assert block_hash([1, 2, 3], 5) == xxhash.xxh64_intdigest(data)
    assert block_hash((1, 2, 3), 5) == block_hash([1, 2, 3], 5)
    several = [([1, 2, 3], 5), ([1, 2, 3], 6), ([1, 3, 2], 5), ([1, 2], 5), ([1, 2, 3, 0], 5)]
    assert len({block_hash(*one) for one in several}) == len(several)
    assert block_hash([151935], 2**64 - 1) < 2**64  # parents of any size


@pytest.mark.parametrize("length", range(1, 14))
def test_match_finds_full_blocks_alone(length: int) -> None:
    life = Life(8)
    seq = life.start(tokens(13))
    found = life.cache.match(tokens(length))
    assert found == seq.block_table[: length // S]
    assert life.cache.match([99, *tokens(length)]) == []


def test_at_least_one_token_is_computed() -> None:
    life = Life(12)
    life.start(tokens(12))
    for length, cached in ((12, 8), (13, 12), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)):
        seq = life.start(tokens(length))
        assert seq.num_computed == cached
        life.end(seq)


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    life = Life(12)
    life.start([*tokens(4), *tokens(4, 50)])
    assert len(life.cache.match([*tokens(4), *tokens(4, 50)])) == 2
    assert life.cache.match([*tokens(4, 20), *tokens(4, 50)]) == []
    assert life.cache.match(tokens(4, 50)) == []


def test_only_what_is_stored_is_found() -> None:
    life = Life(8)
    seq = life.start(tokens(12), done=0)
    for done in range(13):
        life.cache.register(seq, done)
        assert len(life.cache.match(tokens(12))) == done // S
    life.cache.register(seq, 5)  # never backwards
    assert len(life.cache.match(tokens(12))) == 3


def test_stored_tokens_that_are_not_known_yet() -> None:
    """At depth 1 a step stores the token that the host has not read: not findable by guess."""
    life = Life(8)
    seq = life.start(tokens(7))
    life.cache.register(seq, 8)
    assert len(life.cache.match(tokens(8))) == 1
    seq.token_ids.append(7)
    life.cache.register(seq, 8)
    assert len(life.cache.match(tokens(8))) == 2


def test_shared_blocks_outlive_their_first_owner() -> None:
    life = Life(8)
    first = life.start(tokens(9))
    second = life.start([*tokens(8), 77])
    shared = first.block_table[:2]
    assert second.block_table[:2] == shared and life.cache.num_used == 4
    assert [life.cache.ref_counts[block] for block in shared] == [2, 2]
    life.end(first)
    assert [life.cache.ref_counts[block] for block in shared] == [1, 1]
    assert not set(shared) & set(life.cache.free_blocks)
    life.end(second)
    assert life.cache.num_used == 0 and life.cache.match(tokens(8)) == shared


def test_reused_block_is_not_found_under_its_old_hash() -> None:
    """Case K30, at every size of the intruder."""
    for length in range(1, 17):
        life = Life(4)
        life.end(life.start([*tokens(8), 9]))
        life.end(life.start(tokens(length, 100)))
        # 3 of 4 blocks were the first one's; content lies in 2 of them.
        kept = min(2, 4 - -(-length // S))
        assert life.cache.match(tokens(8)) == life.cache.match(tokens(kept * S))
        assert len(life.cache.match(tokens(8))) == kept


def test_blocks_without_content_go_first_then_the_least_recently_given_up() -> None:
    life = Life(8)
    old, new = life.start(tokens(4)), life.start(tokens(4, 50))
    plain = life.start([7])
    blocks = old.block_table + new.block_table
    life.end(old)
    life.end(new)
    life.end(plain)
    order = list(life.cache.free_blocks)
    assert order[-2:] == blocks  # after all that hold nothing worth keeping
    life.start(tokens(24, 1000))
    assert list(life.cache.free_blocks) == blocks
    life.start([8])
    assert life.cache.match(tokens(4)) == [] and life.cache.match(tokens(4, 50)) == blocks[1:]


def test_tails_are_given_up_before_heads() -> None:
    life = Life(4)
    life.end(life.start(tokens(16)))
    for left in (3, 2, 1, 0):
        life.start([900 + left])
        assert len(life.cache.match(tokens(16))) == left


def test_a_hit_renews_a_block() -> None:
    life = Life(3)
    old, new = life.start(tokens(4)), life.start(tokens(4, 50))
    life.end(old)
    life.end(new)
    life.end(life.start(tokens(5)))  # asks for the older one
    life.start(tokens(8, 100))
    assert len(life.cache.match(tokens(4))) == 1 and life.cache.match(tokens(4, 50)) == []


def test_can_allocate_counts_shared_blocks_once() -> None:
    life = Life(4)
    life.start(tokens(12))  # 3 of 4 blocks
    same = Sequence(9, [*tokens(12), 5], SamplingParams())
    other = Sequence(10, tokens(13, 100), SamplingParams())
    assert life.cache.can_allocate(same) and not life.cache.can_allocate(other)
    longer = Sequence(11, [*tokens(12), *tokens(5, 200)], SamplingParams())
    assert not life.cache.can_allocate(longer)
    assert life.cache.allocate(same) == 12


def test_cached_free_blocks_are_not_counted_twice() -> None:
    """A cached block that nobody holds is free and shared at once: it is one block."""
    life = Life(4)
    life.end(life.start(tokens(16)))
    life.start([900])
    seq = Sequence(9, tokens(16), SamplingParams())
    assert not life.cache.can_allocate(seq)  # 3 left of 4, whatever they hold
    fits = Sequence(10, tokens(12), SamplingParams())
    assert life.cache.can_allocate(fits) and life.cache.allocate(fits) == 8
    life.cache.check([*life.live, fits])


def test_prompt_logprobs_skip_the_look_up_and_register_all_the_same() -> None:
    life = Life(8)
    life.end(life.start(tokens(9)))
    life.cache.reset()
    seq = life.start(tokens(9), prompt_logprobs=1)
    assert seq.num_computed == 0 and len(life.cache.match(tokens(9))) == 2
    again = life.start(tokens(9), prompt_logprobs=0)
    assert again.num_computed == 0 and not set(again.block_table) & set(seq.block_table)
    assert life.start(tokens(9)).num_computed == 8


def test_equal_content_twice_is_indexed_once() -> None:
    """Two that compute the same text side by side: one is indexed, both go on correctly."""
    life = Life(8)
    first, second = life.start(tokens(9), done=0), life.start(tokens(9), done=0)
    life.cache.register(second, 4)
    life.cache.register(first, 8)
    life.cache.register(second, 9)
    assert life.cache.match(tokens(8)) == [second.block_table[0], first.block_table[1]]
    life.end(second)
    life.end(first)
    seq = life.start(tokens(9))
    assert seq.num_computed == 8
    life.end(seq)


def test_a_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash of two values almost everything collides; no look-up finds foreign content."""
    monkeypatch.setattr(prefix_cache, "block_hash", lambda ids, parent: (sum(ids) + parent) % 2)
    life = Life(20)
    texts = [tokens(8, first) for first in range(0, 40, 3)]
    for text in texts:
        seq = life.start(text)
        for other in texts:
            parent = ROOT
            for index, block in enumerate(life.cache.match(other)):
                content = life.cache.cached[block]
                assert content.tokens == tuple(other[index * S : index * S + S])
                assert content.parent == parent
                parent = content.identity
        life.end(seq)


def test_a_child_whose_parent_was_replaced_is_not_found() -> None:
    """Identity, not only the hash: the parent's block may come back with another history."""
    life = Life(6)
    life.end(life.start(tokens(8)))
    head, tail = life.cache.match(tokens(8))
    life.cache._forget(head)
    assert life.cache.match(tokens(8)) == []
    seq = life.start(tokens(4))  # the head again, under a new identity
    assert life.cache.match(tokens(8)) == seq.block_table
    assert tail in life.cache.cached
    life.start(tokens(8))  # and the whole chain again: the old tail's entry is replaced
    assert len(life.cache.match(tokens(8))) == 2 and tail not in life.cache.match(tokens(8))


def test_reset_forgets_content_and_keeps_blocks() -> None:
    life = Life(8)
    seq = life.start(tokens(9))
    life.end(life.start(tokens(9, 50)))
    table = list(seq.block_table)
    life.cache.reset()
    assert not life.cache.index and not life.cache.cached and seq.block_table == table
    seq.token_ids += [9, 10, 11]
    life.cache.append(seq)
    life.cache.register(seq, 12)  # a chain without its beginning: harmless, never found
    assert life.cache.match(seq.token_ids) == []
    life.end(seq)
    assert life.start(tokens(9)).num_computed == 0
