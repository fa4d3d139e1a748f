"""The KV cache's blocks: who holds which, which are free, and what the free ones still remember.

PagedAttention (Kwon et al., SOSP 2023, section 4) with a prefix cache: a full block whose content is known by
a hash keeps that content after its last holder has let go, until its memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

BlockKey = tuple[int, bytes]
"""What a cached block holds: its KV group, and the hash of its tokens and of everything before them."""


COPIES_KEPT = 256
"""Copies on write that a pool remembers, for whoever watches it."""


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees this."""


class BlockObserver(Protocol):
    """Told of what a pool does, as it does it. It must not change the pool."""

    def allocated(self, block_ids: Sequence[int]) -> None:
        """These blocks were handed out; what they held before is lost."""

    def shared(self, block_ids: Sequence[int]) -> None:
        """Each of these blocks got one more holder, and was free before or not."""

    def reset(self) -> None:
        """The prefix cache was emptied by hand: how long its blocks would have lived, nobody knows."""


class BlockPool:
    """A fixed number of KV blocks with reference counts and a prefix cache.

    All blocks exist from the start and are named 0 to ``num_blocks - 1``. A block is free while nobody holds
    it. Free blocks wait in the order in which they are handed out: those without a known content first (the
    one freed last at the front, so that the memory touched stays small and warm), then cached ones, the least
    recently used first. Every operation is O(1) a block.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
        debug: holders note each block's generation, so that a block that was freed under them is found.

    Attributes:
        num_copies: copies on write since the start.
        copies: the latest of them, as (source, copy).
        observer: told of what happens, if there is one; it costs a comparison a call if there is none.
    """

    def __init__(self, num_blocks: int, block_size: int, *, debug: bool = False) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks, got {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.debug = debug
        self.generations = [0] * num_blocks
        self.num_copies = 0
        self.copies: deque[tuple[int, int]] = deque(maxlen=COPIES_KEPT)
        self.observer: BlockObserver | None = None
        self._reference_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._cached: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content is known, held or free."""
        return len(self._cached)

    @property
    def reference_counts(self) -> list[int]:
        """How many hold each block: the pool's own list, to be read only."""
        return self._reference_counts

    @property
    def keys(self) -> list[BlockKey | None]:
        """What each block is known to contain: the pool's own list, to be read only."""
        return self._keys

    def reference_count(self, block_id: int) -> int:
        return self._reference_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one holder and a generation of its own; what they remembered
        is forgotten.

        Raises:
            OutOfBlocksError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._reference_counts[block_id] = 1
            self.generations[block_id] += 1
            taken.append(block_id)
        if self.observer is not None:
            self.observer.allocated(taken)
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each block.

        Raises:
            ValueError: a block is free and remembers nothing, so there is nothing to share.
        """
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                if self._keys[block_id] is None:
                    raise ValueError(f"block {block_id} is free and cannot be shared")
                del self._free[block_id]
                self.generations[block_id] += 1
            self._reference_counts[block_id] += 1
        if self.observer is not None:
            self.observer.shared(block_ids)

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one holder from each block; a block that loses its last one is free. Release a sequence's
        tail before its head: what is released first is forgotten first.

        Raises:
            ValueError: a block is free already (it was released twice).
        """
        for block_id in block_ids:
            count = self._reference_counts[block_id]
            if count == 0:
                raise ValueError(f"block {block_id} was released twice")
            self._reference_counts[block_id] = count - 1
            if count == 1:
                self._free[block_id] = None
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def replace(self, block_id: int) -> int:
        """Exchange a holder's part in a shared block for a block of its own, to which it will be copied.

        Raises:
            OutOfBlocksError: none is free; nothing has changed.
        """
        (copy,) = self.allocate(1)
        self.release([block_id])
        self.num_copies += 1
        self.copies.append((block_id, copy))
        return copy

    # -- the prefix cache ----------------------------------------------------------------------------------

    def register(self, block_id: int, key: BlockKey) -> bool:
        """Note what a held block contains; ``False`` if another block is known for that already."""
        if key in self._cached or self._keys[block_id] is not None:
            return False
        self._cached[key] = block_id
        self._keys[block_id] = key
        return True

    def lookup(self, key: BlockKey) -> int | None:
        """The block that holds this content, or ``None``. It is not taken: see :meth:`share`."""
        return self._cached.get(key)

    def withdraw(self, block_ids: Iterable[int]) -> None:
        """Forget what these blocks were said to contain (the step that should have written it failed)."""
        for block_id in block_ids:
            self._forget(block_id)
            if self._reference_counts[block_id] == 0:
                self._free.move_to_end(block_id, last=False)

    def reset_cache(self) -> None:
        """Forget everything; blocks that are held stay held, but are found by nobody any more."""
        self.withdraw(list(self._cached.values()))
        if self.observer is not None:
            self.observer.reset()

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._cached[key]
            self._keys[block_id] = None
