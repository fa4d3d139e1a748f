"""Weights in GGML's formats, as the ``gguf`` package defines them, and activations rounded to 8 bits as the
kernels are documented to."""

from __future__ import annotations

import gguf
import numpy as np

FACTORS = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip
"""Every type, and where its float16 factors lie in a block: the scale, and the minimum if there is one."""
TYPES = ("q4_0", "q4_1", "q8_0")
GROUP = 32


def gguf_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def block_of(name: str) -> tuple[int, int]:
    """A block's elements and bytes."""
    return gguf.GGML_QUANT_SIZES[gguf_type(name)]


def quantise(name: str, weight: np.ndarray) -> np.ndarray:
    """uint8 [rows, bytes of a row]; for the types that ``gguf`` can quantise."""
    return gguf.quants.quantize(weight.astype(np.float32), gguf_type(name))


def dequantise(name: str, stored: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(stored, gguf_type(name))


def random_blocks(name: str, rows: int, k: int, seed: int = 1) -> np.ndarray:
    """uint8 [rows, bytes of a row]: all bits random but for the factors, which are like a model's."""
    elements, num_bytes = block_of(name)
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, k // elements, num_bytes), np.uint8)
    for offset in FACTORS[name]:
        factor = rng.uniform(0.001, 0.01, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
        set_factor(blocks, offset, factor)
    return blocks.reshape(rows, -1)


def set_factor(blocks: np.ndarray, offset: int, factor: np.ndarray | float) -> None:
    """Writes a float16 into each of ``blocks`` [*, bytes of a block]."""
    values = np.broadcast_to(np.asarray(factor, np.float16), blocks.shape[:-1])
    blocks[..., offset : offset + 2] = np.ascontiguousarray(values)[..., None].view(np.uint8)


def round_activations(x: np.ndarray) -> np.ndarray:
    """float64: each group of 32 as integers times max|x| / 127."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    nonzero = largest >= np.float32(1e-30)
    factor = np.where(nonzero, np.float32(127) / np.where(nonzero, largest, 1), 0).astype(np.float32)
    values = np.rint(groups * factor)
    scale = np.where(nonzero, largest / np.float32(127), 0).astype(np.float32)
    return (values.astype(np.float64) * scale).reshape(x.shape)
