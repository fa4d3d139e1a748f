"""Rows of 8-bit floats that share float32 scales: the format ``float8_e4m3`` of
:class:`~streamllm.ops.stored_rows.StoredRows`.

The numbers have a sign, 4 bits of exponent and 3 of mantissa, no infinity, and NaN as 0x7f and 0xff
(``torch.float8_e4m3fn``). Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamllm.ops.stored_rows import StoredRows

FORMAT = "float8_e4m3"
BLOCK = 128
"""Elements that share a scale; the last ones of a row may be fewer."""


def _e4m3_values() -> npt.NDArray[np.float32]:
    codes = np.arange(256, dtype=np.uint16)
    # In a float16's place, exponent and mantissa mean the number divided by 2^8.
    values = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).view(np.float16).astype(np.float32) * 256
    values[codes & 0x7F == 0x7F] = np.nan
    return values


E4M3_VALUES = _e4m3_values()
"""What each code means, float32 ``[256]``."""


def float8_row_bytes(columns: int) -> int:
    """Bytes of a row of so many elements."""
    return columns + 4 * -(-columns // BLOCK)


def pack_float8(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> StoredRows:
    """Rows of uint8 codes ``[rows, columns]`` with their scales ``[rows, ceil(columns / 128)]``."""
    scales = np.ascontiguousarray(scales, "<f4")
    return StoredRows(FORMAT, np.concatenate([scales.view(np.uint8), codes], axis=1))


def unpack_float8(stored: StoredRows) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Codes and scales as :func:`pack_float8` takes them; the codes are a view.

    Raises:
        ValueError: the format is another.
    """
    if stored.format != FORMAT:
        raise ValueError(f"rows in {stored.format} are not {FORMAT}")
    scale_bytes = 4 * -(-stored.data.shape[1] // (BLOCK + 4))
    scales = np.ascontiguousarray(stored.data[:, :scale_bytes]).view("<f4")
    return stored.data[:, scale_bytes:], scales


def float8_values(stored: StoredRows) -> npt.NDArray[np.float32]:
    """What some rows stand for, float32 ``[rows, columns]``.

    Raises:
        ValueError: the format is another.
    """
    codes, scales = unpack_float8(stored)
    values = E4M3_VALUES.take(codes)
    whole = codes.shape[1] // BLOCK
    blocks = values[:, : whole * BLOCK].reshape(len(values), whole, BLOCK)
    blocks *= scales[:, :whole, None]
    if whole < scales.shape[1]:
        values[:, whole * BLOCK :] *= scales[:, whole:]
    return values
