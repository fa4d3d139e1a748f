"""How long KV blocks live, lie idle and wait to be used again, measured on a sample of them.

Meanings are vLLM's (``--kv-cache-metrics``): a life begins when a block is handed out and ends when its
memory is handed out again. In between, each new holder is an access: a request that finds the block in the
prefix cache, or another choice of the same request. A life is told when it ends, so that those that last
longer than anybody looks are missing.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

ACCESSES_KEPT = 4
"""Accesses of a life whose gaps are told, the latest ones."""


@dataclass(frozen=True, slots=True)
class BlockLife:
    """One life of a block that has ended; all times in seconds.

    Attributes:
        lifetime: from the block's allocation to its next one.
        idle: from its last access, or from its allocation if there was none, to its next allocation.
        reuse_gaps: between consecutive accesses, of the last :data:`ACCESSES_KEPT`.
    """

    lifetime: float
    idle: float
    reuse_gaps: tuple[float, ...]


class _Life:
    """A life that goes on."""

    __slots__ = ("accesses", "birth")

    def __init__(self, birth: float) -> None:
        self.birth = birth
        self.accesses: deque[float] = deque(maxlen=ACCESSES_KEPT)

    def ended(self, now: float) -> BlockLife:
        last_access = self.accesses[-1] if self.accesses else self.birth
        gaps = tuple(later - earlier for earlier, later in pairwise(self.accesses))
        return BlockLife(now - self.birth, now - last_access, gaps)


class BlockLives:
    """Follows lives through a pool's :attr:`~streamllm.engine.block_pool.BlockPool.observer`.

    Args:
        sample_rate: share of lives that are followed, above 0, up to 1.
        clock: seconds that never go back.
    """

    def __init__(self, sample_rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._sample_rate = sample_rate
        self._clock = clock
        self._random = random.Random()
        self._followed: dict[int, _Life] = {}
        self._callbacks: list[Callable[[BlockLife], None]] = []

    def on_end(self, callback: Callable[[BlockLife], None]) -> None:
        """Call ``callback`` with every life that ends."""
        self._callbacks.append(callback)

    def allocated(self, block_ids: Sequence[int]) -> None:
        now = self._clock()
        for block_id in block_ids:
            life = self._followed.pop(block_id, None)
            if life is not None:
                ended = life.ended(now)
                for callback in self._callbacks:
                    callback(ended)
            if self._random.random() < self._sample_rate:
                self._followed[block_id] = _Life(now)

    def shared(self, block_ids: Sequence[int]) -> None:
        now = self._clock()
        for block_id in block_ids:
            life = self._followed.get(block_id)
            if life is not None:
                life.accesses.append(now)

    def reset(self) -> None:
        """Follow none of the lives that go on any further."""
        self._followed.clear()
