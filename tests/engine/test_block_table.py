from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_table import NO_BLOCK, BlockTables, most_blocks
from streamllm.engine.prefix_hash import block_hashes, chain_seed, next_hash


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_a_sequence_holds_no_more_blocks_than_its_tokens_need(tokens, blocks):
    tables = BlockTables(BlockPool(8, 16))
    for _ in range(2):
        assert tables.grow(tokens, 0) == []
        assert len(tables.tables[0].block_ids) == blocks


def test_what_cannot_grow_is_unchanged():
    pool = BlockPool(2, 16)
    tables = BlockTables(pool)
    assert tables.grow(20, 0) == []
    assert tables.grow(33, 20) is None
    assert len(tables.tables[0].block_ids) == 2
    tables.release()
    assert pool.num_free == 2


def test_the_first_to_write_into_a_shared_block_takes_a_copy():
    pool = BlockPool(8, 16)
    parent = BlockTables(pool)
    parent.grow(20, 0)
    first, second = parent.tables[0].block_ids
    child = parent.fork()
    assert pool.num_used == 2
    ((source, destination),) = child.grow(21, 20)
    assert source == second and child.tables[0].block_ids == [first, destination]
    assert parent.grow(21, 20) == []
    assert parent.tables[0].block_ids == [first, second]
    assert child.take_updates() == [(0, 0, [first, destination])]


def test_only_what_the_runner_does_not_know_is_told():
    tables = BlockTables(BlockPool(8, 16))
    tables.grow(20, 0)
    assert tables.all_blocks() == [tables.tables[0].block_ids]
    assert not tables.has_news
    tables.grow(40, 20)
    assert tables.take_updates() == [(0, 2, tables.tables[0].block_ids[2:])]
    assert tables.take_updates() == []


def test_blocks_outside_the_window_are_given_back():
    pool = BlockPool(8, 16)
    tables = BlockTables(pool, [None, 20])
    tables.grow(64, 0)
    tables.drop_outside_window(64)
    full, windowed = (table.block_ids for table in tables.tables)
    assert NO_BLOCK not in full
    # Position 64 sees 45 to 64: blocks 0 and 1 are done with.
    assert [block == NO_BLOCK for block in windowed] == [True, True, False, False]
    assert pool.num_used == 6
    tables.release()
    assert pool.num_used == 0


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 400),
    chunk=st.integers(1, 70),
    window=st.integers(1, 100),
    block_size=st.sampled_from([16, 32]),
)
def test_a_sequence_never_holds_more_than_most_blocks_says(length, chunk, window, block_size):
    windows = [None, window]
    pool = BlockPool(200, block_size)
    tables = BlockTables(pool, windows)
    computed = 0
    while computed < length:
        tables.drop_outside_window(computed)
        end = min(computed + chunk, length)
        assert tables.grow(end, computed) == []
        assert pool.num_used <= most_blocks(length, block_size, windows, chunk)
        computed = end


@given(st.lists(st.integers(0, 2**31), max_size=80), st.lists(st.integers(0, 2**31), max_size=80))
def test_hashes_are_equal_exactly_where_the_tokens_from_the_start_are(left, right):
    seed = chain_seed()
    pairs = zip(block_hashes(left, 16, seed), block_hashes(right, 16, seed), strict=False)
    for index, (one, other) in enumerate(pairs, start=1):
        assert (one == other) == (left[: 16 * index] == right[: 16 * index])


def test_a_chain_can_be_continued_and_seeds_differ():
    tokens = list(range(48))
    hashes = block_hashes(tokens, 16, chain_seed())
    assert next_hash(hashes[1], tokens[32:]) == hashes[2]
    seeds = [chain_seed(), chain_seed(salt=""), chain_seed(salt="a"), chain_seed(prompt_length=5)]
    assert len(set(seeds)) == 4
    assert all(len(seed) == 16 for seed in seeds)
