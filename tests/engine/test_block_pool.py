from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamllm.engine.block_pool import BlockPool, OutOfBlocksError


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks)
    assert pool.num_free == 4


def test_allocating_too_much_takes_nothing():
    pool = BlockPool(3, 16)
    with pytest.raises(OutOfBlocksError, match="4 blocks wanted, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_releasing_twice_and_sharing_a_free_block_are_errors():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="released twice"):
        pool.release([block])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([block])


def test_cached_blocks_are_handed_out_last_and_forgotten_then():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        assert pool.register(block, (0, bytes([number])))
    pool.release(reversed(blocks))
    assert (pool.num_free, pool.num_cached) == (4, 3)
    # The fresh one first, then the tail of what was released.
    assert pool.allocate(2)[1] == blocks[2]
    assert pool.lookup((0, b"\2")) is None
    assert pool.lookup((0, b"\0")) == blocks[0]


def test_a_free_block_that_remembers_can_be_taken_up_again():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.register(block, (0, b"key"))
    pool.release([block])
    pool.share([block])
    assert (pool.num_free, pool.reference_count(block)) == (1, 1)


def test_a_content_is_known_once_and_can_be_withdrawn():
    pool = BlockPool(3, 16)
    first, second = pool.allocate(2)
    assert pool.register(first, (0, b"key"))
    assert not pool.register(second, (0, b"key"))
    assert pool.register(second, (1, b"key"))
    pool.withdraw([first])
    assert pool.lookup((0, b"key")) is None
    pool.reset_cache()
    assert pool.num_cached == 0


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a plain count of who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, 16)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
        else:
            self.holders.append(self.pool.allocate(count))

    @rule(data=st.data())
    def share(self, data):
        if self.holders:
            blocks = list(data.draw(st.sampled_from(self.holders)))
            self.pool.share(blocks)
            self.holders.append(blocks)

    @rule(data=st.data())
    def release(self, data):
        if self.holders:
            index = data.draw(st.integers(0, len(self.holders) - 1))
            self.pool.release(self.holders.pop(index))

    @rule(data=st.data(), number=st.integers(0, 5))
    def register(self, data, number):
        if self.holders and (blocks := data.draw(st.sampled_from(self.holders))):
            self.pool.register(blocks[0], (0, bytes([number])))

    @rule(number=st.integers(0, 5))
    def take_up(self, number):
        block = self.pool.lookup((0, bytes([number])))
        if block is not None:
            self.pool.share([block])
            self.holders.append([block])

    @rule()
    def reset(self):
        self.pool.reset_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def counts_equal_holders(self):
        held = [block for blocks in self.holders for block in blocks]
        for block in range(self.pool.num_blocks):
            assert self.pool.reference_count(block) == held.count(block)
        assert self.pool.num_used == len(set(held))
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_copy_on_write_is_remembered():
    pool = BlockPool(4, 16)
    (block,) = pool.allocate(1)
    pool.share([block])
    copy = pool.replace(block)
    assert (pool.reference_count(block), pool.reference_count(copy)) == (1, 1)
    assert pool.num_copies == 1 and list(pool.copies) == [(block, copy)]
    pool.allocate(2)
    pool.share([block])
    with pytest.raises(OutOfBlocksError):
        pool.replace(block)
    assert pool.num_copies == 1 and pool.reference_count(block) == 2
