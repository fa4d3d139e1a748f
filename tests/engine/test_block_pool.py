from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from streamllm.engine.block_pool import BlockPool, OutOfBlocksError
from streamllm.engine.block_table import BlockTable


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


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_a_table_holds_no_more_blocks_than_its_tokens_need(tokens, blocks):
    table = BlockTable(BlockPool(8, 16))
    assert table.grow(tokens)
    assert len(table) == blocks
    assert table.grow(tokens)
    assert len(table) == blocks


def test_a_table_that_cannot_grow_is_unchanged():
    pool = BlockPool(2, 16)
    table = BlockTable(pool)
    assert table.grow(20)
    assert not table.grow(33)
    assert len(table) == 2
    table.release()
    assert pool.num_free == 2


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

    @invariant()
    def counts_equal_holders(self):
        held = [block for blocks in self.holders for block in blocks]
        for block in range(self.pool.num_blocks):
            assert self.pool.reference_count(block) == held.count(block)
        assert self.pool.num_used == len(set(held))
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
