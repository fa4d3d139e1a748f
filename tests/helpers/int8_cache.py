"""The int8 KV cache in numpy: its quantisation on every device, and where a GPU's elements and scales lie."""

from __future__ import annotations

import numpy as np


def quantize_heads(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Heads [..., head_dim] as the int8 cache holds them: int8 of that shape, and float32 scales [...]."""
    clipped = np.clip(x.astype(np.float32), -65504, 65504)
    largest = np.abs(clipped).max(-1)
    with np.errstate(all="ignore"):
        factor = np.where(largest >= 1e-30, np.float32(127) / largest, np.float32(0))[..., None]
        integers = np.where(np.isnan(factor) | (factor == 0), 0, np.rint(clipped * factor)).astype(np.int8)
    return integers, np.where(largest < 1e-30, 0, largest / np.float32(127)).astype(np.float32)


def hard_heads(num_heads: int, head_dim: int) -> np.ndarray:
    """Heads of 24 tokens, float64 ``[24, num_heads, head_dim]``: of all magnitudes, zeros, too small ones,
    halves, and with elements that are too large or NaN."""
    rng = np.random.default_rng(head_dim)
    heads = rng.standard_normal((24, num_heads, head_dim))
    heads *= 10.0 ** rng.integers(-20, 4, (24, num_heads, 1))
    heads[1] = 0
    heads[2] *= 1e-31 / np.abs(heads[2]).max()
    heads[3] = rng.integers(-252, 253, (num_heads, head_dim)) / 2
    heads[3, :, 1] = -127
    for token, special in enumerate([np.nan, np.inf, -np.inf, 3e38, -65504, 65505], start=4):
        heads[token, -1 - token % 4, token % head_dim] = special
    return heads


def unwritten_plane(num_blocks: int, kv_heads: int, block_size: int, head_dim: int) -> np.ndarray:
    """Keys or values that nobody has written: int8 ``[num_blocks, kv_heads, block_size * (head_dim + 4)]``,
    scales NaN."""
    plane = np.full((num_blocks, kv_heads, block_size * (head_dim + 4)), 99, np.int8)
    elements_and_scales(plane, head_dim)[1][:] = np.nan
    return plane


def elements_and_scales(plane: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of a plane: int8 ``[num_blocks, kv_heads, block_size, head_dim]``, float32 without the last of
    these."""
    block_size = plane.shape[-1] // (head_dim + 4)
    elements = plane[..., : block_size * head_dim]
    scales = plane[..., block_size * head_dim :]
    return elements.reshape(*plane.shape[:-1], block_size, head_dim), scales.view(np.float32)
