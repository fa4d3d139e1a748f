"""Float matrices quantised as they are read (``--quantization``), into formats of GGML that have kernels.

``int8`` is Q8_0: a scale for every 32 elements of a row, rounding to the nearest, 8.5 bits an element.

``int4`` is Q4_1 (5 bits an element: a scale and a minimum for every 32) with scales that are searched for the
least error, columns weighed by what the model multiplies them by (:mod:`streamllm.models.calibration`). Q8_0
stays what is small or hurts most: embeddings and the head, routers, and value projections.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from streamllm import _native as native
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.dequantize import FLOAT_DTYPES
from streamllm.models.parallel import rows_in_parallel
from streamllm.ops.stored_rows import StoredRows

Array = npt.NDArray[np.float32]

_GROUP = native.GROUP
_GROUP_BYTES = {"q4_1": 20, "q8_0": 34}
_IN_A_LAYER = re.compile(r"\.\d+\.")
_SENSITIVE = re.compile(r"(\bgate|router|_expert_gate|\bv_proj)\.weight$")
"""Routers and value projections."""


class QuantizedCheckpoint:
    """A checkpoint whose float matrices are quantised (a :class:`~streamllm.models.checkpoint.Checkpoint`).

    Matrices that are quantised already stay as they are, and so do those whose rows are no whole groups of
    32.

    Args:
        importance: what an error in each column of a matrix counts, by its name; asked once, before the first
            matrix becomes 4 bits an element.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quantization: Literal["int8", "int4"],
        importance: Callable[[], Mapping[str, Array]],
    ) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._measure_importance = importance

    def names(self) -> set[str]:
        return self._checkpoint.names()

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def read(self, name: str, rows: slice | None = None) -> Array:
        return self._checkpoint.read(name, rows)

    def format(self, name: str) -> str:
        return self._becomes(name) or self._checkpoint.format(name)

    def num_bytes(self, name: str) -> int:
        becomes = self._becomes(name)
        if becomes is None:
            return self._checkpoint.num_bytes(name)
        return math.prod(self.shape(name)) // _GROUP * _GROUP_BYTES[becomes]

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        becomes = self._becomes(name)
        if becomes is None:
            return self._checkpoint.read_stored(name, rows)
        if becomes == "q8_0":
            return StoredRows("q8_0", to_q8_0(self._checkpoint.read(name, rows)))
        return StoredRows("q4_1", to_q4_1(self._checkpoint.read(name, rows), self._importance.get(name)))

    def release(self, name: str) -> None:
        self._checkpoint.release(name)

    def _becomes(self, name: str) -> Literal["q8_0", "q4_1"] | None:
        """What a tensor is quantised to; ``None`` if it stays as it is."""
        shape = self.shape(name)
        is_float = self._checkpoint.format(name) in FLOAT_DTYPES
        if not is_float or len(shape) != 2 or shape[1] % _GROUP:
            return None
        is_robust = _IN_A_LAYER.search(name) and not _SENSITIVE.search(name)
        return "q4_1" if self._quantization == "int4" and is_robust else "q8_0"

    @cached_property
    def _importance(self) -> Mapping[str, Array]:
        return self._measure_importance()


def to_q8_0(values: Array) -> npt.NDArray[np.uint8]:
    """Rows ``[rows, columns]`` in Q8_0, uint8 ``[rows, bytes of a row]``; columns are a multiple of 32."""
    rows, columns = values.shape
    values = np.ascontiguousarray(values)
    stored = _empty_rows(values, "q8_0")

    def convert(part: slice) -> None:
        source, target = values[part], stored[part]
        native.quantize_q8_0(source.ctypes.data, len(source), columns, target.ctypes.data)

    rows_in_parallel(convert, rows, columns)
    return stored


def to_q4_1(values: Array, importance: Array | None = None) -> npt.NDArray[np.uint8]:
    """The same in Q4_1, with the scales and minima that make the least of the squared errors' weighted sum.

    Args:
        importance: the weight of each column's errors, float32 ``[columns]``, not negative; ``None``: they
            all count the same.
    """
    rows, columns = values.shape
    weights = np.ones(columns, np.float32) if importance is None else np.ascontiguousarray(importance)
    values = np.ascontiguousarray(values)
    stored = _empty_rows(values, "q4_1")

    def convert(part: slice) -> None:
        source, target = values[part], stored[part]
        native.quantize_q4_1(
            source.ctypes.data, weights.ctypes.data, len(source), columns, target.ctypes.data
        )

    rows_in_parallel(convert, rows, columns)
    return stored


def _empty_rows(values: Array, format: str) -> npt.NDArray[np.uint8]:
    rows, columns = values.shape
    return np.empty((rows, columns // _GROUP * _GROUP_BYTES[format]), np.uint8)
