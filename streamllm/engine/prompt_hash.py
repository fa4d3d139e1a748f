"""The block hashes of a new prompt, computed beside the event loop if it is long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from streamllm.engine.prefix_hash import block_hashes, chain_seed

if TYPE_CHECKING:
    from streamllm.models.model_config import RopeConfig

LONG_PROMPT = 4_000
"""Tokens from which hashing leaves the event loop (a few milliseconds of work)."""


class PromptHasher:
    """Hashes prompts for the prefix cache.

    Args:
        block_size: positions a block.
        rope: keys depend on the prompt's length where it says so.
        enabled: whether there is a prefix cache.
    """

    def __init__(self, block_size: int, rope: RopeConfig, *, enabled: bool) -> None:
        self._block_size = block_size
        self._rope = rope
        self._enabled = enabled

    async def hash(self, token_ids: list[int], cache_salt: str | None) -> tuple[bytes | None, list[bytes]]:
        """(parent of the first block's hash, hashes of the full blocks); ``None`` and none without cache."""
        if not self._enabled:
            return None, []
        dynamic = (
            self._rope.rope_type == "dynamic" and len(token_ids) > self._rope.original_max_position_embeddings
        )
        seed = chain_seed(salt=cache_salt, prompt_length=len(token_ids) if dynamic else None)
        if len(token_ids) < LONG_PROMPT:
            return seed, block_hashes(token_ids, self._block_size, seed)
        return seed, await asyncio.to_thread(block_hashes, token_ids, self._block_size, seed)
