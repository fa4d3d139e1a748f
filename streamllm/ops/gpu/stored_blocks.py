"""Rows of the files' quantised formats taken apart, in torch: on a device, many rows at a time.

The bits lie as ``ggml-common.h`` (https://github.com/ggml-org/ggml) and
:class:`streamllm.ops.stored_rows.StoredRows` have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from streamllm.ops.float8_rows import BLOCK, float8_row_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """What rows are made of, as :class:`streamllm.ops.gpu.weight_layout.WeightLayout` names it, each
    ``[rows, ...]``, flat or by blocks.

    Attributes:
        codes: uint8.
        scales, minimums: a block's, in their own dtype, e8m0 as uint8; minimums are added.
        group_scales, group_minimums: uint8, a group's; scales with the layout's offset.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    group_scales: Tensor | None = None
    group_minimums: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block of a format in a file.

    Attributes:
        elements, size: how many elements it has, and bytes.
        take_apart: parts of uint8 ``[rows, blocks, size]``.
    """

    elements: int
    size: int
    take_apart: Callable[[Tensor], Parts]


def _number(blocks: Tensor, offset: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """The number at ``offset`` of each block."""
    return _packed(blocks[..., offset : offset + dtype.itemsize]).view(dtype)[..., 0]


def _packed(part: Tensor) -> Tensor:
    """A copy: ``contiguous`` leaves a single row where it is, at any address."""
    return part.clone(memory_format=torch.contiguous_format)


def _runs(source: Tensor, bits: int) -> Tensor:
    """``[..., width]`` bytes as ``[..., 8 / bits, width]`` codes: run r has each byte's r-th lowest."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=source.device)
    return (source[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def _bits_in_order(source: Tensor) -> Tensor:
    """``[..., bytes]`` as ``[..., 8 * bytes]`` single bits, each byte's lowest first."""
    return _runs(source, 1).transpose(-1, -2).flatten(-2)


def _nibbles(source: Tensor, run: int = 16) -> Tensor:
    """``[..., bytes]`` as codes: of every ``run`` bytes the low nibbles, then the high ones."""
    return _runs(source.unflatten(-1, (-1, run)), 4).flatten(-3)


def _pairs_of_bits(source: Tensor) -> Tensor:
    """``[..., bytes]`` as codes of 2 bits: of every 32 bytes four runs."""
    return _runs(source.unflatten(-1, (-1, 32)), 2).flatten(-3)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 2:]), _number(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 4:]), _number(blocks, 0), _number(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 6:]) | _bits_in_order(blocks[..., 2:6]) << 4, _number(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _bits_in_order(blocks[..., 4:8]) << 4
    return Parts(codes, _number(blocks, 0), _number(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[..., 2:] ^ 0x80, _number(blocks, 0))


def _q2_k(blocks: Tensor) -> Parts:
    codes = _pairs_of_bits(blocks[..., 16:80])
    return Parts(codes, _number(blocks, 80), -_number(blocks, 82), blocks[..., :16])


def _q3_k(blocks: Tensor) -> Parts:
    codes = _pairs_of_bits(blocks[..., 32:96]) | _runs(blocks[..., :32], 1).flatten(-2) << 2
    low = _runs(blocks[..., 96:104], 4).flatten(-2)
    high = _runs(blocks[..., 104:108], 2).flatten(-2)
    return Parts(codes, _number(blocks, 108), group_scales=(low | high << 4) + (128 - 32))


def _k_scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight of each, of 6 bits, from 12 bytes."""
    scales, minima, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    return (
        torch.cat([scales & 63, rest & 15 | scales >> 2 & 0x30], -1),
        torch.cat([minima & 63, rest >> 4 | minima >> 2 & 0x30], -1),
    )


def _q4_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 16:], 32)
    return Parts(codes, _number(blocks, 0), -_number(blocks, 2), *_k_scales_and_minima(blocks[..., 4:16]))


def _q5_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 48:], 32) | _runs(blocks[..., 16:48], 1).flatten(-2) << 4
    return replace(_q4_k(blocks), codes=codes)


def _q6_k(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., :128], 64) | _pairs_of_bits(blocks[..., 128:192]) << 4
    return Parts(codes, _number(blocks, 208), group_scales=blocks[..., 192:208] ^ 0x80)


def _iq4_xs(blocks: Tensor) -> Parts:
    low = _runs(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    high = _runs(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4) + (128 - 32)
    return Parts(_nibbles(blocks[..., 8:]), _number(blocks, 0), group_scales=scales)


def _mxfp4(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks[..., 1:]), blocks[..., 0])


def _int4(blocks: Tensor) -> Parts:
    scales, minimums = (_number(blocks, offset, torch.float32) for offset in (0, 4))
    return Parts(_nibbles(blocks[..., 8:]), scales, minimums)


def _int8(blocks: Tensor) -> Parts:
    scales, minimums = (_number(blocks, offset, torch.float32) for offset in (0, 4))
    return Parts(blocks[..., 8:] ^ 0x80, scales, minimums)


STORED_BLOCKS = {
    "q4_0": StoredBlock(32, 18, _q4_0),
    "q4_1": StoredBlock(32, 20, _q4_1),
    "q5_0": StoredBlock(32, 22, _q5_0),
    "q5_1": StoredBlock(32, 24, _q5_1),
    "q8_0": StoredBlock(32, 34, _q8_0),
    "q2_k": StoredBlock(256, 84, _q2_k),
    "q3_k": StoredBlock(256, 110, _q3_k),
    "q4_k": StoredBlock(256, 144, _q4_k),
    "q5_k": StoredBlock(256, 176, _q5_k),
    "q6_k": StoredBlock(256, 210, _q6_k),
    "iq4_nl": StoredBlock(32, 18, _q4_0),
    "iq4_xs": StoredBlock(256, 136, _iq4_xs),
    "mxfp4": StoredBlock(32, 17, _mxfp4),
    **{f"int4_{elements}": StoredBlock(elements, 8 + elements // 2, _int4) for elements in (32, 64, 128)},
    **{f"int8_{elements}": StoredBlock(elements, 8 + elements, _int8) for elements in (32, 64, 128)},
}
"""By format. Rows of ``float8_e4m3`` are not made of blocks."""


def row_bytes(row_format: str, columns: int) -> int:
    """Bytes of a stored row of so many elements.

    Raises:
        ValueError: there is no such row, or it cannot be taken apart.
    """
    if row_format == "float8_e4m3":
        return float8_row_bytes(columns)
    block = STORED_BLOCKS.get(row_format)
    if block is None or columns % block.elements:
        raise ValueError(f"rows of {columns} elements stored as {row_format} must be dequantised")
    return columns // block.elements * block.size


def take_apart(row_format: str, rows: Tensor, columns: int) -> Parts:
    """Stored rows, uint8 ``[rows, bytes of one]``."""
    if row_format == "float8_e4m3":
        return _float8(rows, columns)
    block = STORED_BLOCKS[row_format]
    return block.take_apart(rows.unflatten(1, (-1, block.size)))


def _float8(rows: Tensor, columns: int) -> Parts:
    """Kernels know no NaN among values: a block that holds one has NaN as its scale."""
    codes = rows[:, rows.shape[1] - columns :]
    scales = _packed(rows[:, : rows.shape[1] - columns]).view(torch.float32)
    is_nan = functional.pad((codes & 0x7F) == 0x7F, (0, -columns % BLOCK))
    return Parts(codes, scales.masked_fill(is_nan.unflatten(1, (-1, BLOCK)).any(2), math.nan))
