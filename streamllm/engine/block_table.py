"""A sequence's logical-to-physical block mapping, one table for each group of layers."""

from __future__ import annotations

from collections.abc import Sequence

from streamllm.engine.block_pool import BlockPool
from streamllm.runner.messages import BlockCopy, BlockUpdate

NO_BLOCK = -1
"""Stands in a table where a block has left the group's window."""


class BlockTable:
    """One KV group's blocks of one sequence, in logical order.

    Position ``p`` lives in block ``block_ids[p // block_size]`` at offset ``p % block_size``.

    Attributes:
        window: positions that a row of this group sees, its own included; ``None`` for all.
        block_ids: physical blocks; leading ones are ``NO_BLOCK`` once they have left the window.
        num_dropped: how many those are.
        num_sent: leading entries that the runner knows.
        generations: of each block when it was taken; kept in debug mode only.
    """

    __slots__ = ("block_ids", "generations", "num_dropped", "num_sent", "window")

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.block_ids: list[int] = []
        self.generations: list[int] = []
        self.num_dropped = 0
        self.num_sent = 0

    @property
    def held(self) -> list[int]:
        """The blocks that this table holds a reference to."""
        return self.block_ids[self.num_dropped :]


class BlockTables:
    """The block tables of one sequence, one per KV group, over a shared pool.

    Blocks are taken only when tokens need them: at most ``block_size - 1`` slots of a table are unused.

    Attributes:
        forked: whether a partly filled block may be shared with another sequence.
        has_news: whether the runner has not been told of some block.
    """

    __slots__ = ("_has_windows", "_pool", "_size", "forked", "has_news", "tables")

    def __init__(self, pool: BlockPool, windows: Sequence[int | None] = (None,)) -> None:
        self._pool = pool
        self._size = pool.block_size
        self._has_windows = any(window is not None for window in windows)
        self.forked = False
        self.has_news = False
        self.tables = [BlockTable(window) for window in windows]

    def blocks_missing(self, num_tokens: int, num_computed: int) -> int:
        """Blocks to take before positions ``num_computed..num_tokens - 1`` can be written: new ones, and a
        copy of a shared block that would be written to."""
        missing = 0
        last, first_written = -(-num_tokens // self._size), num_computed // self._size
        for table in self.tables:
            have = len(table.block_ids)
            missing += max(last - have, 0)
            if first_written < have and self._is_shared(table.block_ids[first_written]):
                missing += 1
        return missing

    def blocks_promised(self, num_tokens: int, num_computed: int, max_chunk: int) -> int:
        """As :meth:`blocks_missing`, for positions that are computed over several steps in chunks of
        ``max_chunk`` at most: a group with a window gives back what leaves it on the way."""
        missing = self.blocks_missing(num_tokens, num_computed)
        if not self._has_windows:
            return missing
        for table in self.tables:
            held = len(table.block_ids) - table.num_dropped
            most = most_blocks(num_tokens, self._size, [table.window], max_chunk)
            new = max(-(-num_tokens // self._size) - len(table.block_ids), 0)
            missing -= max(new - max(most - held, 0), 0)
        return missing

    def grow(self, num_tokens: int, num_computed: int) -> list[BlockCopy] | None:
        """Make positions ``num_computed..num_tokens - 1`` writable by this sequence alone.

        Returns:
            The blocks to copy first (copy-on-write), or ``None``, and nothing taken, if the pool cannot.
        """
        pool, size = self._pool, self._size
        last, first_written = -(-num_tokens // size), num_computed // size
        missing = self.blocks_missing(num_tokens, num_computed)
        if missing > pool.num_free:
            return None
        copies: list[BlockCopy] = []
        if missing == 0:
            return copies
        for table in self.tables:
            block_ids = table.block_ids
            if first_written < len(block_ids) and self._is_shared(block_ids[first_written]):
                source = block_ids[first_written]
                block_ids[first_written] = pool.replace(source)
                copies.append((source, block_ids[first_written]))
                table.num_sent = min(table.num_sent, first_written)
            if last > len(block_ids):
                block_ids.extend(pool.allocate(last - len(block_ids)))
        self._note_change()
        return copies

    def drop_outside_window(self, num_computed: int) -> None:
        """Give back blocks that no row from position ``num_computed`` on will see."""
        if not self._has_windows:
            return
        for table in self.tables:
            if table.window is None:
                continue
            outside = max(num_computed - table.window + 1, 0) // self._size
            outside = min(outside, len(table.block_ids))
            if outside > table.num_dropped:
                self._pool.release(table.block_ids[table.num_dropped : outside])
                table.block_ids[table.num_dropped : outside] = [NO_BLOCK] * (outside - table.num_dropped)
                table.num_dropped = outside
                self._stamp()

    def fork(self) -> BlockTables:
        """The same blocks held once more, the partly filled last one too."""
        child = BlockTables(self._pool, [table.window for table in self.tables])
        for mine, its in zip(self.tables, child.tables, strict=True):
            its.block_ids = list(mine.block_ids)
            its.num_dropped = mine.num_dropped
            self._pool.share(mine.held)
        self.forked = child.forked = True
        child._note_change()
        return child

    def release(self) -> None:
        """Give every block back, tails first."""
        for table in self.tables:
            self._pool.release(reversed(table.held))
            table.block_ids = []
            table.num_dropped = table.num_sent = 0
        self.forked = False
        self._stamp()

    # -- the prefix cache ----------------------------------------------------------------------------------

    def adopt_prefix(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        """Hold the longest cached prefix that every group has, of at most ``max_blocks`` blocks; the tables
        must be empty.

        Returns:
            Its length in blocks.
        """
        length = self._longest_prefix(hashes, max_blocks)
        for group, table in enumerate(self.tables):
            first = 0 if table.window is None else self._first_needed(table.window, length)
            found = [self._pool.lookup((group, hashes[index])) for index in range(first, length)]
            held = [block_id for block_id in found if block_id is not None]
            self._pool.share(held)
            table.block_ids = [NO_BLOCK] * first + held
            table.num_dropped = first
        self._note_change()
        return length

    def register(self, hashes: Sequence[bytes], first: int, last: int) -> list[int]:
        """Tell the pool what blocks ``first..last - 1`` hold; returns those that it did not know."""
        new = []
        for group, table in enumerate(self.tables):
            for index in range(max(first, table.num_dropped), last):
                block_id = table.block_ids[index]
                if self._pool.register(block_id, (group, hashes[index])):
                    new.append(block_id)
        return new

    def _longest_prefix(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        lookup = self._pool.lookup
        length = min(max_blocks, len(hashes))
        for group, table in enumerate(self.tables):
            if table.window is None:
                for index in range(length):
                    if lookup((group, hashes[index])) is None:
                        length = index
                        break
        # A group with a window needs only what the window still shows at the end of the prefix.
        windowed = [(group, t.window) for group, t in enumerate(self.tables) if t.window is not None]
        while length > 0:
            gap = -1
            for group, window in windowed:
                for index in range(length - 1, self._first_needed(window, length) - 1, -1):
                    if lookup((group, hashes[index])) is None:
                        gap = max(gap, index)
                        break
            if gap < 0:
                break
            length = gap
        return length

    def _first_needed(self, window: int, num_blocks: int) -> int:
        return max(num_blocks * self._size - window + 1, 0) // self._size

    # -- the runner's view ---------------------------------------------------------------------------------

    def all_blocks(self) -> list[list[int]]:
        """Every table in full, noted as sent."""
        for table in self.tables:
            table.num_sent = len(table.block_ids)
        self.has_news = False
        return [list(table.block_ids) for table in self.tables]

    def take_updates(self) -> list[BlockUpdate]:
        """What the runner has not been told yet, noted as sent."""
        updates: list[BlockUpdate] = []
        for group, table in enumerate(self.tables):
            if table.num_sent < len(table.block_ids):
                updates.append((group, table.num_sent, table.block_ids[table.num_sent :]))
                table.num_sent = len(table.block_ids)
        self.has_news = False
        return updates

    # -- debugging -----------------------------------------------------------------------------------------

    def check_generations(self) -> None:
        """Every block held is still the one that was taken.

        Raises:
            AssertionError: one was freed and given to somebody else meanwhile.
        """
        for table in self.tables:
            now = [self._pool.generations[block_id] for block_id in table.held]
            assert now == table.generations, f"blocks {table.held} were reused: {table.generations} -> {now}"

    def _note_change(self) -> None:
        self.has_news = True
        self._stamp()

    def _stamp(self) -> None:
        if self._pool.debug:
            for table in self.tables:
                table.generations = [self._pool.generations[block_id] for block_id in table.held]

    def _is_shared(self, block_id: int) -> bool:
        return block_id != NO_BLOCK and self._pool.reference_count(block_id) > 1


def most_blocks(num_tokens: int, block_size: int, windows: Sequence[int | None], max_chunk: int) -> int:
    """Blocks that a sequence of ``num_tokens`` tokens holds at most, computed in chunks of ``max_chunk``."""
    total = 0
    for window in windows:
        if window is None or num_tokens <= window + max_chunk:
            total += -(-num_tokens // block_size)
        else:
            # The window before the chunk, the chunk, and a partly used block at either end.
            total += -(-(window - 1 + max_chunk) // block_size) + 1
    return total
