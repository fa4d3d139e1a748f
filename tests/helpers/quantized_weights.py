"""Weights in every format with what they stand for, by somebody else's definition where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from streamllm.ops.float8_rows import pack_float8, unpack_float8
from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix, quantize_float8, quantize_int8
from streamllm.ops.gpu.weight_rows import WeightRows
from streamllm.ops.stored_rows import StoredRows


@dataclass(frozen=True)
class Block:
    """A block in a file: its elements and bytes, and at which bytes it has factors of which type."""

    elements: int
    size: int
    factors: tuple[int, ...]
    dtype: str = "<f2"


BLOCKS = {
    "q4_0": Block(32, 18, (0,)),
    "q4_1": Block(32, 20, (0, 2)),
    "q5_0": Block(32, 22, (0,)),
    "q5_1": Block(32, 24, (0, 2)),
    "q8_0": Block(32, 34, (0,)),
    "q2_k": Block(256, 84, (80, 82)),
    "q3_k": Block(256, 110, (108,)),
    "q4_k": Block(256, 144, (0, 2)),
    "q5_k": Block(256, 176, (0, 2)),
    "q6_k": Block(256, 210, (208,)),
    "iq4_nl": Block(32, 18, (0,)),
    "iq4_xs": Block(256, 136, (0,)),
    "mxfp4": Block(32, 17, (0,), "u1"),
    **{f"int4_{elements}": Block(elements, 8 + elements // 2, (0, 4), "<f4") for elements in (32, 64, 128)},
    **{f"int8_{elements}": Block(elements, 8 + elements, (0, 4), "<f4") for elements in (32, 64, 128)},
}
"""Of every format of a file that stays quantised on a GPU, but for ``float8_e4m3``."""

FILE_FORMATS = [*BLOCKS, "float8_e4m3"]

FORMATS = ["q4_0", "q4_1", "q8_0", "int8_row", "float8_row", "dense"]
"""One of each kind; the others differ in what a tile is made of, not in how tiles are added up."""


def stored_groups(
    row_format: str, rows: int, columns: int, rng: np.random.Generator, scale: float = 0.05
) -> StoredRows:
    """Random bits under factors of up to ``scale`` and of either sign; of blocks with groups, whose integers
    they multiply, so much smaller."""
    if row_format == "float8_e4m3":
        codes = rng.integers(0, 0x7F, (rows, columns), dtype=np.uint8)
        codes |= rng.integers(0, 2, codes.shape, dtype=np.uint8) << 7
        return pack_float8(codes, rng.uniform(-scale, scale, (rows, -(-columns // 128))).astype(np.float32))
    block = BLOCKS[row_format]
    stored = rng.integers(0, 256, (rows, columns // block.elements, block.size), dtype=np.uint8)
    limit = scale / 16 if block.elements == 256 else scale
    for offset in block.factors:
        if block.dtype == "u1":
            stored[..., offset] = rng.integers(118, 125, stored.shape[:2])
        else:
            values = rng.uniform(-limit, limit, stored.shape[:2]).astype(block.dtype)[..., None]
            stored[..., offset : offset + values.itemsize] = values.view(np.uint8)
    return StoredRows(row_format, stored.reshape(rows, -1))


def dequantized(stored: StoredRows) -> np.ndarray:
    """What stored rows stand for, float32: by the gguf package, or of its own formats as
    :class:`~streamllm.ops.stored_rows.StoredRows` defines them."""
    if stored.format == "float8_e4m3":
        codes, scales = unpack_float8(stored)
        values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
        return values * scales.repeat(128, 1)[:, : values.shape[1]]
    if not stored.format.startswith("int"):
        return dequantize(stored.data, gguf.GGMLQuantizationType[stored.format.upper()])
    block = BLOCKS[stored.format]
    blocks = stored.data.reshape(len(stored.data), -1, block.size)
    scale, minimum = (blocks[..., at : at + 4].copy().view("<f4") for at in block.factors)
    integers = blocks[..., 8:]
    if stored.format.startswith("int4"):
        halves = integers.reshape(*blocks.shape[:2], -1, 1, 16)
        nibbles = np.concatenate([halves & 15, halves >> 4], -2).reshape(*blocks.shape[:2], -1)
        integers = nibbles - np.uint8(8)
    values = scale * integers.view(np.int8).astype(np.float32) + minimum
    return values.reshape(len(blocks), -1)


def random_rows(
    row_format: str, rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[WeightRows, np.ndarray]:
    """A weight, and the float64 values that it stands for."""
    rng = np.random.default_rng(seed)
    if row_format in FILE_FORMATS:
        stored = stored_groups(row_format, rows, columns, rng)
        matrix = QuantizedMatrix.from_parts(rows, columns, [stored], device, dtype)
        return matrix.pieces[0], dequantized(stored).astype(np.float64)
    weight = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
    scales = weight.abs().amax(1, keepdim=True).double()
    if row_format == "int8_row":
        codes = (weight.double() / (scales / 127)).round()
        return quantize_int8(weight.to(device)), (codes * (scales / 127)).numpy()
    if row_format == "float8_row":
        values = (weight / (scales / 448).float()).to(torch.float8_e4m3fn).double()
        return quantize_float8(weight.to(device)), (values * (scales / 448)).numpy()
    stored_weight = weight.to(device, dtype)
    return WeightRows("dense", rows, columns, stored_weight), stored_weight.cpu().double().numpy()
