"""Float matrices quantised as they are read (``--quantization int8``).

The format is GGML's Q8_0, whose kernels exist anyway: a scale for every 32 elements of a row, rounding to the
nearest (the ``gguf`` package's).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from streamllm.models.checkpoint import Checkpoint
from streamllm.models.dequantize import FLOAT_DTYPES
from streamllm.models.parallel import rows_in_parallel
from streamllm.ops.stored_rows import StoredRows

_FORMAT = "q8_0"
_GROUP, _GROUP_BYTES = 32, 34


class QuantizedCheckpoint:
    """A checkpoint whose float matrices are quantised (a :class:`~streamllm.models.checkpoint.Checkpoint`).

    Matrices that are quantised already stay as they are, and so do those whose rows are no whole groups of
    32.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def names(self) -> set[str]:
        return self._checkpoint.names()

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        return self._checkpoint.read(name)

    def format(self, name: str) -> str:
        return _FORMAT if self._is_converted(name) else self._checkpoint.format(name)

    def num_bytes(self, name: str) -> int:
        if not self._is_converted(name):
            return self._checkpoint.num_bytes(name)
        return math.prod(self.shape(name)) // _GROUP * _GROUP_BYTES

    def read_stored(self, name: str) -> StoredRows:
        if not self._is_converted(name):
            return self._checkpoint.read_stored(name)
        return StoredRows(_FORMAT, _quantized(self._checkpoint.read(name)))

    def _is_converted(self, name: str) -> bool:
        shape = self.shape(name)
        is_float = self._checkpoint.format(name) in FLOAT_DTYPES
        return is_float and len(shape) == 2 and shape[1] % _GROUP == 0

    def release(self, name: str) -> None:
        self._checkpoint.release(name)


def _quantized(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Rows ``[rows, columns]`` in :data:`_FORMAT`, uint8 ``[rows, bytes of a row]``."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    rows, columns = values.shape
    stored = np.empty((rows, columns // _GROUP * _GROUP_BYTES), np.uint8)

    def convert(part: slice) -> None:
        stored[part] = quantize(values[part], GGMLQuantizationType.Q8_0)

    rows_in_parallel(convert, rows, columns)
    return stored
