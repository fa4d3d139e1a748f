"""Checks of the block manager's bookkeeping, for debug mode and tests."""

from __future__ import annotations

from collections.abc import Iterable

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.request import Sequence


def check_blocks(pool: BlockPool, sequences: Iterable[Sequence]) -> None:
    """Every block counts its holders, and is still the one that each holder was given.

    Args:
        sequences: all that hold blocks, those of the step in flight included.

    Raises:
        AssertionError: a block was freed, reused or counted wrongly.
    """
    holders: dict[int, int] = {}
    for sequence in dict.fromkeys(sequences):
        sequence.blocks.check_generations()
        for table in sequence.blocks.tables:
            for block_id in table.held:
                holders[block_id] = holders.get(block_id, 0) + 1
    for block_id in range(pool.num_blocks):
        counted, held = pool.reference_count(block_id), holders.get(block_id, 0)
        assert counted == held, f"block {block_id} counts {counted} holders and has {held}"
