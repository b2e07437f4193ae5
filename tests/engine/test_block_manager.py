"""The plain block manager, call by call; `test_block_manager_machine.py` does it at random."""

from __future__ import annotations

import pytest

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.prefix_cache import PrefixCache
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams

CLASSES = [BlockManager, PrefixCache]


def sequence(seq_id: int, tokens: list[int]) -> Sequence:
    return Sequence(seq_id, tokens, SamplingParams())


@pytest.mark.parametrize("manager_class", CLASSES)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_blocks_for_a_prompt(manager_class: type[BlockManager], block_size: int) -> None:
    for length in range(1, 3 * block_size + 2):
        manager = manager_class(20 * block_size, block_size)
        seq = sequence(0, [1] * length)
        assert manager.allocate(seq) == 0
        assert len(seq.block_table) == -(-length // block_size) == manager.blocks_needed(length)
        assert manager.num_used == len(set(seq.block_table)) == len(seq.block_table)
        manager.check([seq])


@pytest.mark.parametrize("manager_class", CLASSES)
def test_a_block_exactly_when_the_last_one_is_full(manager_class: type[BlockManager]) -> None:
    manager = manager_class(3, 4)
    seq = sequence(0, [1])
    manager.allocate(seq)
    for length in range(2, 13):
        seq.token_ids.append(1)
        assert manager.can_append(seq)
        manager.append(seq)
        manager.append(seq)  # twice changes nothing
        assert len(seq.block_table) == -(-length // 4)
    seq.token_ids.append(1)
    assert not manager.can_append(seq) and manager.num_free == 0


@pytest.mark.parametrize("manager_class", CLASSES)
def test_pending_tokens_count(manager_class: type[BlockManager]) -> None:
    """A token in flight has a place already."""
    manager = manager_class(2, 4)
    seq = sequence(0, [1] * 4)
    manager.allocate(seq)
    seq.num_pending = 1
    manager.append(seq)
    assert len(seq.block_table) == 2


@pytest.mark.parametrize("manager_class", CLASSES)
def test_room(manager_class: type[BlockManager]) -> None:
    manager = manager_class(4, 4)
    first, second = sequence(0, [1] * 9), sequence(1, [2] * 5)
    manager.allocate(first)
    assert not manager.can_allocate(second) and manager.can_allocate(sequence(2, [3] * 4))
    manager.free(first)
    assert manager.can_allocate(second) and manager.can_allocate(sequence(2, [3] * 16))
    assert not manager.can_allocate(sequence(2, [3] * 17))


@pytest.mark.parametrize("manager_class", CLASSES)
def test_free_twice(manager_class: type[BlockManager]) -> None:
    manager = manager_class(4, 4)
    seq, other = sequence(0, [1] * 9), sequence(1, [2])
    manager.allocate(seq)
    manager.free(seq)
    manager.allocate(other)
    manager.free(seq)
    assert manager.num_used == 1
    manager.check([seq, other])
    assert sorted(manager.free_blocks) == sorted(set(range(4)) - set(other.block_table))


def test_allocate_twice_is_an_internal_error() -> None:
    manager = BlockManager(4, 4)
    seq = sequence(0, [1])
    manager.allocate(seq)
    with pytest.raises(AssertionError, match="already holds blocks"):
        manager.allocate(seq)


def test_check_finds_faults() -> None:
    """The integrity check is only worth something if it fails."""
    for spoil in (
        lambda m, s: m.ref_counts.__setitem__(s.block_table[0], 2),
        lambda m, s: m.free_blocks.__setitem__(s.block_table[0], None),
        lambda m, s: m.free_blocks.popitem(),
        lambda m, s: s.block_table.pop(),
        lambda m, s: s.block_table.append(s.block_table[0]),
    ):
        manager = BlockManager(4, 4)
        seq = sequence(0, [1] * 5)
        manager.allocate(seq)
        manager.check([seq])
        spoil(manager, seq)
        with pytest.raises(AssertionError):
            manager.check([seq])


def test_the_plain_manager_never_shares() -> None:
    manager = BlockManager(8, 4)
    first, second = sequence(0, [1] * 9), sequence(1, [1] * 9)
    manager.allocate(first)
    manager.register(first, 9)
    assert manager.allocate(second) == 0
    assert not set(first.block_table) & set(second.block_table)
    manager.reset()
    manager.check([first, second])
