"""Rows of integers that share float32 scales and minima: the formats ``int4_*`` and ``int8_*`` of
:class:`~streamllm.ops.stored_rows.StoredRows`.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from streamllm.ops.stored_rows import StoredRows

BLOCKS = (128, 64, 32)
"""Elements of a block, the most first."""

_FORMAT = re.compile(r"int(?P<bits>4|8)_(?P<block>32|64|128)")
_FACTOR_BYTES = 8


def integer_format(bits: int, block: int) -> str:
    """The name of the format of integers of 4 or 8 ``bits`` in blocks of 32, 64 or 128 elements."""
    return f"int{bits}_{block}"


def parse_integer_format(name: str) -> tuple[int, int] | None:
    """(bits, elements of a block) of a format; ``None`` where it is another."""
    match = _FORMAT.fullmatch(name)
    return (int(match["bits"]), int(match["block"])) if match else None


def integer_row_bytes(bits: int, block: int, columns: int) -> int:
    """Bytes of a row of ``columns`` elements, whole blocks."""
    return columns // block * (_FACTOR_BYTES + block * bits // 8)


def pack_integers(
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    minima: npt.NDArray[np.float32],
    bits: int,
    out: npt.NDArray[np.uint8],
) -> None:
    """Writes rows into ``out``, uint8 ``[rows, bytes of a row]``.

    Args:
        codes: ``[rows, columns]``: 8 (of 4 bits) or 128 more than the integers.
        scales, minima: ``[rows, blocks]``.
    """
    rows, blocks = scales.shape
    stored = out.reshape(rows, blocks, -1)
    stored[..., 0:4] = np.ascontiguousarray(scales, "<f4")[..., None].view(np.uint8)
    stored[..., 4:8] = np.ascontiguousarray(minima, "<f4")[..., None].view(np.uint8)
    if bits == 8:
        np.bitwise_xor(codes.reshape(rows, blocks, -1), 0x80, out=stored[..., 8:])
        return
    halves = codes.reshape(rows, blocks, -1, 2, 16)
    packed = halves[..., 1, :] << 4
    packed |= halves[..., 0, :]
    stored[..., 8:] = packed.reshape(rows, blocks, -1)


def unpack_integers(
    stored: StoredRows,
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The integers ``[rows, columns]`` of some rows, and the scales and minima ``[rows, blocks]``.

    Raises:
        ValueError: the format is another.
    """
    parsed = parse_integer_format(stored.format)
    if parsed is None:
        raise ValueError(f"rows in {stored.format} are not integers with a scale and a minimum")
    bits, block = parsed
    rows = len(stored.data)
    blocks = stored.data.reshape(rows, -1, _FACTOR_BYTES + block * bits // 8)
    factors = np.ascontiguousarray(blocks[..., :_FACTOR_BYTES]).view("<f4")
    values = blocks[..., _FACTOR_BYTES:]
    if bits == 8:
        integers = np.ascontiguousarray(values).view(np.int8)
    else:
        packed = values.reshape(rows, blocks.shape[1], -1, 1, 16)
        integers = np.concatenate([packed & 15, packed >> 4], axis=3).view(np.int8)
        integers -= 8
    return integers.reshape(rows, -1), factors[..., 0], factors[..., 1]


def integer_values(stored: StoredRows) -> npt.NDArray[np.float32]:
    """What some rows stand for, float32 ``[rows, columns]``.

    Raises:
        ValueError: the format is another.
    """
    integers, scales, minima = unpack_integers(stored)
    values = integers.astype(np.float32).reshape(*scales.shape, -1)
    values *= scales[..., None]
    values += minima[..., None]
    return values.reshape(integers.shape)
