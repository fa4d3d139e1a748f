"""The block hashes of a new prompt, computed beside the event loop if it is long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamllm.engine.prefix_hash import block_hashes, chain_seed, restarted_seed
from streamllm.models.rope import depends_on_length, restart_length

if TYPE_CHECKING:
    from streamllm.models.model_config import RopeConfig

LONG_PROMPT = 4_000
"""Tokens from which hashing leaves the event loop (a few milliseconds of work)."""


class PromptHasher:
    """Hashes prompts for the prefix cache.

    Args:
        block_size: positions a block.
        ropes: the model's rotary embeddings; keys depend on the prompt's length where one says so.
        enabled: whether there is a prefix cache.
    """

    def __init__(self, block_size: int, ropes: Sequence[RopeConfig], *, enabled: bool) -> None:
        self._block_size = block_size
        self._dynamic = [rope for rope in ropes if rope.rope_type == "dynamic"]
        self._restart_length = restart_length(ropes)
        self._enabled = enabled

    async def hash(
        self, token_ids: list[int], cache_salt: str | None, adapter: bytes | None = None
    ) -> tuple[bytes | None, list[bytes]]:
        """(parent of the first block's hash, hashes of the full blocks); ``None`` and none without cache.

        Args:
            cache_salt, adapter: as of :func:`chain_seed`.
        """
        if not self._enabled:
            return None, []
        length = len(token_ids)
        dynamic = any(depends_on_length(rope, length) for rope in self._dynamic)
        seed = chain_seed(salt=cache_salt, prompt_length=length if dynamic else None, adapter=adapter)
        if 0 < self._restart_length < length:
            seed = restarted_seed(seed)
        if length < LONG_PROMPT:
            return seed, block_hashes(token_ids, self._block_size, seed)
        return seed, await asyncio.to_thread(block_hashes, token_ids, self._block_size, seed)
