"""The KV cache's blocks: who holds which, and which are free (PagedAttention, SOSP 2023, section 4)."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees this."""


class BlockPool:
    """A fixed number of KV blocks with reference counts.

    All blocks exist from the start and are named 0 to ``num_blocks - 1``. A block is free while nobody holds
    it; the block freed last is handed out first, so that the memory touched stays small and warm.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens a block holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks, got {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._reference_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def reference_count(self, block_id: int) -> int:
        return self._reference_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one holder.

        Raises:
            OutOfBlocksError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        for block_id in taken:
            self._reference_counts[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block.

        Raises:
            ValueError: a block is free, so there is nothing to share.
        """
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one holder from each block; a block that loses its last one is free.

        Raises:
            ValueError: a block is free already (it was released twice).
        """
        for block_id in block_ids:
            count = self._reference_counts[block_id]
            if count == 0:
                raise ValueError(f"block {block_id} was released twice")
            self._reference_counts[block_id] = count - 1
            if count == 1:
                self._free.append(block_id)
