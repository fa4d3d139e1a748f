"""Stored rows as float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.parallel import rows_in_parallel
from streamllm.ops import float8_rows
from streamllm.ops.integer_rows import integer_values, parse_integer_format
from streamllm.ops.stored_rows import StoredRows

FLOAT_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8"}
"""Formats of plain numbers, and what numpy reads them as; bfloat16 as its bits, the upper half of a
float32."""


def to_float32(rows: StoredRows, name: str) -> npt.NDArray[np.float32]:
    """The values of stored rows, float32 ``[rows, columns]``.

    Args:
        name: of the tensor, for the message.

    Raises:
        ModelLoadError: the format cannot be read.
    """
    if rows.format in FLOAT_DTYPES:
        return floats(rows.data.view(FLOAT_DTYPES[rows.format]), rows.format)
    if parse_integer_format(rows.format) is not None:
        return integer_values(rows)
    if rows.format == float8_rows.FORMAT:
        return float8_rows.float8_values(rows)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType[rows.format.upper()]
        first = dequantize(rows.data[:1], kind)
    except (KeyError, NotImplementedError) as error:
        raise ModelLoadError(
            f"The tensor {name} has the type {rows.format}, which is not supported."
        ) from error
    values = np.empty((len(rows.data), first.shape[-1]), np.float32)

    def convert(part: slice) -> None:
        values[part] = dequantize(rows.data[part], kind)

    rows_in_parallel(convert, *values.shape)
    return values


def floats(values: npt.NDArray[np.generic], format: str) -> npt.NDArray[np.float32]:
    """Numbers in one of :data:`FLOAT_DTYPES`, in any order of memory, as float32 in row-major order; those
    that are that already, as they are."""
    if format == "float32":
        return np.require(values, dtype=np.float32, requirements=["C", "A"])
    converted = np.empty(values.shape, np.float32)

    def convert(part: slice) -> None:
        if format == "bfloat16":
            bits = converted.view(np.uint32)[part]
            bits[...] = values[part]
            bits <<= 16
        else:
            converted[part] = values[part]

    rows_in_parallel(convert, len(converted), converted[0].size if len(converted) else 1)
    return converted
