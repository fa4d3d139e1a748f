"""What a watcher is told of the block pool, against the pool itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_watch import HELD_BY_MORE, HELD_BY_ONE, KNOWN, PAGE, BlockWatch, runs


def true_states(pool):
    return [
        min(pool.reference_count(block), HELD_BY_MORE) | KNOWN * (pool.keys[block] is not None)
        for block in range(pool.num_blocks)
    ]


def apply(states, news):
    for first, count, state in news:
        states[first : first + count] = state


@pytest.mark.parametrize("num_blocks", [1, 64, PAGE, PAGE + 1, 5 * PAGE - 3])
def test_the_news_of_random_changes_add_up_to_the_pool(num_blocks):
    random.seed(num_blocks)
    pool = BlockPool(num_blocks, 16)
    watch = BlockWatch(pool)
    told = np.zeros(num_blocks, np.uint8)
    held: list[int] = []
    for turn in range(200):
        for _ in range(random.randrange(4)):
            if pool.num_free and random.random() < 0.5:
                held += pool.allocate(random.randint(1, pool.num_free))
            elif held and random.random() < 0.5:
                block = random.choice(held)
                pool.share([block])
                held.append(block)
            elif held and random.random() < 0.5:
                pool.register(random.choice(held), (0, random.randbytes(4)))
            elif random.random() < 0.05:
                pool.reset_cache()
            else:
                random.shuffle(held)
                cut = random.randrange(len(held) + 1)
                pool.release(held[cut:])
                del held[cut:]
        news = watch.look()
        apply(told, news)
        assert told.tolist() == true_states(pool) == watch.states.tolist()
        everything = np.full(num_blocks, 99, np.uint8)
        apply(everything, watch.all())
        assert everything.tolist() == told.tolist()
        assert watch.look() == []
        if turn == 0:
            assert all(count > 0 for _, count, _ in news)


def test_a_changed_content_alone_is_no_news():
    pool = BlockPool(8, 16)
    watch = BlockWatch(pool)
    (block,) = pool.allocate(1)
    pool.register(block, (0, b"a"))
    assert watch.look() == [(block, 1, HELD_BY_ONE | KNOWN)]
    pool.withdraw([block])
    pool.register(block, (0, b"b"))
    assert watch.look() == []


def test_runs():
    states = np.array([1, 1, 2, 2, 0, 0, 1], np.uint8)
    assert runs(np.arange(7), states) == [(0, 2, 1), (2, 2, 2), (4, 2, 0), (6, 1, 1)]
    assert runs(np.array([0, 1, 3, 6]), states) == [(0, 2, 1), (3, 1, 2), (6, 1, 1)]
    assert runs(np.array([], int), states) == []


def test_a_look_reads_only_pages_that_changed(monkeypatch):
    pool = BlockPool(100 * PAGE, 16)
    watch = BlockWatch(pool)
    watch.look()
    pages = []
    from streamllm.engine import block_watch

    original = block_watch._states
    monkeypatch.setattr(block_watch, "_states", lambda *page: pages.append(page) or original(*page))
    pool.allocate(PAGE + 1)
    watch.look()
    assert len(pages) == 2
    watch.look()
    assert len(pages) == 2
