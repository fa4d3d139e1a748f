"""Columns of stored rows: where they can be cut, and the cut."""

from __future__ import annotations

import numpy as np

from streamllm.errors import ModelLoadError
from streamllm.models.dequantize import FLOAT_DTYPES
from streamllm.ops import float8_rows
from streamllm.ops.integer_rows import integer_row_bytes, parse_integer_format
from streamllm.ops.stored_rows import StoredRows


def block_columns(format: str, name: str) -> int:
    """Columns that can only be taken together; 1 for plain numbers.

    Args:
        name: of the tensor, for the message.

    Raises:
        ModelLoadError: nobody knows the format.
    """
    return float8_rows.BLOCK if format == float8_rows.FORMAT else _block(format, name)[0]


def take_columns(rows: StoredRows, columns: range, name: str) -> StoredRows:
    """The same rows with these columns alone, which begin and end with blocks (or with the rows)."""
    if rows.format == float8_rows.FORMAT:
        codes, scales = float8_rows.unpack_float8(rows)
        blocks = slice(columns.start // float8_rows.BLOCK, -(-columns.stop // float8_rows.BLOCK))
        return float8_rows.pack_float8(codes[:, columns.start : columns.stop], scales[:, blocks])
    block, num_bytes = _block(rows.format, name)
    if columns.start % block or columns.stop % block:
        raise ValueError(f"{columns} does not begin and end with blocks of {block} columns")
    taken = rows.data[:, columns.start // block * num_bytes : columns.stop // block * num_bytes]
    return StoredRows(rows.format, np.ascontiguousarray(taken))


def _block(format: str, name: str) -> tuple[int, int]:
    """Columns and bytes of a block."""
    if format in FLOAT_DTYPES:
        return 1, np.dtype(FLOAT_DTYPES[format]).itemsize
    if (integers := parse_integer_format(format)) is not None:
        bits, block = integers
        return block, integer_row_bytes(bits, block, block)
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType[format.upper()]]
    except KeyError as error:
        raise ModelLoadError(f"The tensor {name} has the type {format}, which is not supported.") from error
