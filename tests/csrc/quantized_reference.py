"""Weights in the kernels' quantised formats, GGML's as the ``gguf`` package defines them, and activations
rounded to 8 bits as the kernels are documented to."""

from __future__ import annotations

import re

import gguf
import numpy as np

FACTORS = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
    "mxfp4": (0,), "int4_32": (0, 4), "int4_64": (0, 4), "int4_128": (0, 4), "int8_32": (0, 4),
    "int8_64": (0, 4), "int8_128": (0, 4),
}  # fmt: skip
"""Every type, and where its factors lie in a block: the scale, and the minimum if there is one. They are
float16, but float32 in ``int*``, and in ``mxfp4`` the exponent of a power of two."""
TYPES = ("q4_0", "q4_1", "q8_0")
GROUP = 32


def gguf_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def block_of(name: str) -> tuple[int, int]:
    """A block's elements and bytes."""
    if match := re.fullmatch(r"int([48])_(\d+)", name):
        bits, elements = int(match[1]), int(match[2])
        return elements, 8 + elements * bits // 8
    return gguf.GGML_QUANT_SIZES[gguf_type(name)]


def quantise(name: str, weight: np.ndarray) -> np.ndarray:
    """uint8 [rows, bytes of a row]; for the types that ``gguf`` can quantise."""
    return gguf.quants.quantize(weight.astype(np.float32), gguf_type(name))


def dequantise(name: str, stored: np.ndarray) -> np.ndarray:
    if not name.startswith("int"):
        with np.errstate(over="ignore"):
            return gguf.quants.dequantize(stored, gguf_type(name))
    blocks = stored.reshape(len(stored), -1, block_of(name)[1])
    scale, minimum = (np.ascontiguousarray(blocks[..., i : i + 4]).view(np.float32) for i in (0, 4))
    values = blocks[..., 8:]
    if name.startswith("int8"):
        integers = values.view(np.int8).astype(np.float32)
    else:
        runs = values.reshape(*values.shape[:2], -1, 16).astype(np.int32)
        integers = np.concatenate([runs % 16 - 8, runs // 16 - 8], axis=-1).astype(np.float32)
    integers = integers.reshape(*scale.shape[:2], -1)
    return (scale * integers + minimum).reshape(len(stored), -1)


def random_blocks(name: str, rows: int, k: int, seed: int = 1) -> np.ndarray:
    """uint8 [rows, bytes of a row]: all bits random but for the factors, which are like a model's."""
    elements, num_bytes = block_of(name)
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, k // elements, num_bytes), np.uint8)
    for offset in FACTORS[name]:
        factor = rng.uniform(0.001, 0.01, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])
        set_factor(name, blocks, offset, factor)
    return blocks.reshape(rows, -1)


def set_factor(name: str, blocks: np.ndarray, offset: int, factor: np.ndarray | float) -> None:
    """Writes a factor (of mxfp4 the power of two below) into each of ``blocks`` [*, bytes of a block]."""
    if name == "mxfp4":
        exponent = np.maximum(np.frexp(np.abs(factor))[1] - 1 + 127, 0)
        blocks[..., offset] = np.where(np.asarray(factor) == 0, 0, exponent)
        return
    dtype = np.dtype(np.float32 if name.startswith("int") else np.float16)
    values = np.broadcast_to(np.asarray(factor, dtype), blocks.shape[:-1])
    stored = np.ascontiguousarray(values)[..., None].view(np.uint8)
    blocks[..., offset : offset + dtype.itemsize] = stored


def round_activations(x: np.ndarray) -> np.ndarray:
    """float64: each group of 32 as integers times max|x| / 127."""
    groups = x.reshape(len(x), x.shape[1] // GROUP, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    nonzero = largest >= np.float32(1e-30)
    factor = np.where(nonzero, np.float32(127) / np.where(nonzero, largest, 1), 0).astype(np.float32)
    values = np.rint(groups * factor)
    scale = np.where(nonzero, largest / np.float32(127), 0).astype(np.float32)
    return (values.astype(np.float64) * scale).reshape(x.shape)
