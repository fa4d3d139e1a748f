"""What changes in the block pool, for somebody who watches it from time to time.

The pool does nothing for its watcher: no callbacks and no counters. A look compares the pool's lists with a
copy of what they were; Python compares lists of the same objects at a few nanoseconds an element, so that
only the pages in which something has changed are read block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamllm.engine.block_pool import BlockKey, BlockPool

HELD_BY_ONE = 1
HELD_BY_MORE = 2
KNOWN = 4
"""A block's state: one of the first two or, while it is free, neither; and whether the prefix cache knows its
content."""

Run = tuple[int, int, int]
"""Blocks in a row that have the same state: the first one, how many, the state."""

PAGE = 256
"""Blocks that are compared, and read again, together."""


class BlockWatch:
    """
    Args:
        pool: read, never changed.

    Attributes:
        states: uint8 ``[num_blocks]``, each block's state at the last look; at first all free and unknown.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.states = np.zeros(pool.num_blocks, np.uint8)
        self._pool = pool
        self._counts = [0] * pool.num_blocks
        self._keys: list[BlockKey | None] = [None] * pool.num_blocks

    def look(self) -> list[Run]:
        """Runs of the blocks whose state has changed since the last look, in order."""
        counts, keys = self._pool.reference_counts, self._pool.keys
        if counts == self._counts and keys == self._keys:
            return []
        before = self.states.copy()
        for first in range(0, len(self._counts), PAGE):
            page = slice(first, first + PAGE)
            page_counts, page_keys = counts[page], keys[page]
            if page_counts != self._counts[page] or page_keys != self._keys[page]:
                self._counts[page], self._keys[page] = page_counts, page_keys
                self.states[page] = _states(page_counts, page_keys)
        return runs(np.flatnonzero(before != self.states), self.states)

    def all(self) -> list[Run]:
        """Runs of all blocks, as they were at the last look."""
        return runs(np.arange(len(self.states)), self.states)


def _states(counts: Sequence[int], keys: Sequence[BlockKey | None]) -> np.ndarray:
    holders = np.minimum(np.array(counts), HELD_BY_MORE).astype(np.uint8)
    known = np.array([key is not None for key in keys])
    return holders | known * np.uint8(KNOWN)


def runs(block_ids: np.ndarray, states: np.ndarray) -> list[Run]:
    """Blocks, in ascending order, as runs of neighbours with the same state.

    Args:
        block_ids: integers ``[count]``.
        states: uint8 ``[num_blocks]``.
    """
    if not len(block_ids):
        return []
    values = states[block_ids]
    begins = np.flatnonzero((np.diff(block_ids) != 1) | (np.diff(values) != 0)) + 1
    begins = np.concatenate(([0], begins))
    lengths = np.diff(np.concatenate((begins, [len(block_ids)])))
    return list(zip(block_ids[begins].tolist(), lengths.tolist(), values[begins].tolist(), strict=True))
