"""The paged KV cache's memory: one allocation for all layers.

A block holds ``block_size`` positions of one sequence, in tiles of 16. Keys lie with a tile's positions side
by side for each dimension, so that a score is summed over the head in one order whatever the batch; values
lie position by position. In int8 the key and the value of each position and head have a float32 scale each,
which stand at the ends of their tiles: whoever moves a block moves its scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamllm.errors import ConfigError, ModelLoadError
from streamllm.ops.memory import map_memory

KEY_LANES = 16
"""Positions that lie side by side in a key block; ``block_size`` is a multiple of it."""

DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}


def kv_bytes_per_block(
    layers_per_block: int, num_kv_heads: int, head_dim: int, block_size: int, kv_cache_dtype: str
) -> int:
    """Bytes that one block takes: keys and values of ``layers_per_block`` layers.

    Raises:
        ConfigError: an unknown dtype, or a block size that is not a positive multiple of 16.
    """
    if kv_cache_dtype not in DTYPES:
        raise ConfigError(f"kv_cache_dtype must be one of {', '.join(DTYPES)}, got {kv_cache_dtype!r}.")
    if block_size <= 0 or block_size % KEY_LANES:
        raise ConfigError(f"block_size must be a positive multiple of {KEY_LANES}, got {block_size}.")
    scale_bytes = np.dtype(np.float32).itemsize if kv_cache_dtype == "int8" else 0
    head_bytes = head_dim * DTYPES[kv_cache_dtype].itemsize + scale_bytes
    return layers_per_block * 2 * num_kv_heads * block_size * head_bytes


class KVCache:
    """Keys and values of ``num_blocks`` blocks; page-aligned, zeroed; untouched pages take no memory.

    Attributes:
        planes: ``[layers_per_block, 2 (key, value), num_blocks, elements]``: a block's
            ``num_kv_heads * block_size * head_dim`` elements, in int8 with the scales' bytes among them.
            Plane ``p`` serves the ``p``-th layer of every KV group, whose blocks are different ones.
    """

    def __init__(
        self,
        *,
        layers_per_block: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        kv_cache_dtype: str,
    ):
        self.num_bytes = num_blocks * kv_bytes_per_block(
            layers_per_block, num_kv_heads, head_dim, block_size, kv_cache_dtype
        )
        if num_blocks < 1:
            raise ConfigError(f"the KV cache needs at least one block, got {num_blocks}.")
        self.dtype_name = kv_cache_dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        try:
            memory = map_memory(self.num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ModelLoadError(
                f"Not enough memory for a KV cache of {self.num_bytes / 2**30:.2f} GiB; ask for fewer blocks."
            ) from error
        self.planes = np.frombuffer(memory, DTYPES[kv_cache_dtype]).reshape(
            layers_per_block, 2, num_blocks, -1
        )

    def keys(self, place: int) -> np.ndarray:
        """``[num_blocks, num_kv_heads, block_size / 16, head_dim, 16]``, a view."""
        tiles = self._tiles(place, 0)
        return tiles.reshape(*tiles.shape[:3], self.head_dim, KEY_LANES)

    def values(self, place: int) -> np.ndarray:
        """``[num_blocks, num_kv_heads, block_size / 16, 16, head_dim]``, a view."""
        tiles = self._tiles(place, 1)
        return tiles.reshape(*tiles.shape[:3], KEY_LANES, self.head_dim)

    def scales(self, place: int) -> np.ndarray:
        """In int8, of keys and of values: float32 ``[2, num_blocks, num_kv_heads, block_size / 16, 16]``, a
        view."""
        blocks = self.planes[place].view(np.float32)
        tiles = blocks.reshape(2, self.num_blocks, self.num_kv_heads, self.block_size // KEY_LANES, -1)
        return tiles[..., -KEY_LANES:]

    def _tiles(self, place: int, plane: int) -> np.ndarray:
        """A plane's tiles without their scales."""
        blocks = self.planes[place, plane]
        tiles = blocks.reshape(self.num_blocks, self.num_kv_heads, self.block_size // KEY_LANES, -1)
        return tiles[..., : KEY_LANES * self.head_dim]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks ``(source, destination)`` in every plane; all are read before any is written."""
        if copies:
            sources, destinations = np.array(copies).T
            self.planes[:, :, destinations] = self.planes[:, :, sources]
