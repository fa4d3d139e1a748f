"""A sequence's logical-to-physical block mapping."""

from __future__ import annotations

from streamllm.engine.block_pool import BlockPool


class BlockTable:
    """The physical blocks that hold a sequence's K and V, in logical order.

    Position ``p`` lives in block ``block_ids[p // block_size]`` at offset ``p % block_size``. Blocks are
    taken only when tokens need them: at most ``block_size - 1`` slots of a sequence are ever unused.
    """

    __slots__ = ("_pool", "block_ids")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.block_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.block_ids)

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks to add before positions ``0..num_tokens - 1`` all have a slot."""
        return max(-(-num_tokens // self._pool.block_size) - len(self.block_ids), 0)

    def grow(self, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens; ``False`` (and nothing taken) if the pool cannot."""
        missing = self.blocks_missing(num_tokens)
        if missing > self._pool.num_free:
            return False
        self.block_ids.extend(self._pool.allocate(missing))
        return True

    def release(self) -> None:
        """Give every block back; tails first, so that a prefix is the last to be handed out again."""
        self._pool.release(reversed(self.block_ids))
        self.block_ids = []
