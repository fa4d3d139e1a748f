"""MXFP4: blocks of 32 numbers of 4 bits (E2M1) that share a power of two of 8 bits (E8M0).

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3, 5.4.1 and 6.3. In gpt-oss's
safetensors a row of ``G`` blocks is ``*_blocks [G, 16]``, in whose bytes an even element is the low half and
the odd one after it the high half, and ``*_scales [G]``. GGML puts a block's scale before its 16 bytes, whose
low halves are elements 0 to 15 and whose high halves are elements 16 to 31.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.parallel import rows_in_parallel
from streamllm.models.tensor_source import rows_of_rows
from streamllm.ops.stored_rows import StoredRows

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

BLOCK = 32
"""Numbers that share a scale."""

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# The two numbers of a byte side by side, as one number of 64 bits: those are looked up many times as fast.
_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=1).view(np.int64).ravel()
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)
_CONVERTED_AT_ONCE = 1 << 17


def dequantize(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The numbers of some rows, float32 ``[rows, 32 * G]``, exactly (infinite where float32 ends).

    Args:
        blocks: uint8 ``[rows, G, 16]``.
        scales: uint8 ``[rows, G]``; 255 makes a block NaN, as the specification says.
    """
    rows, groups = scales.shape
    values = np.empty((rows, groups * BLOCK), np.float32)

    def convert(part: slice) -> None:
        numbers = _PAIRS.take(blocks[part], mode="clip").view(np.float32)
        with np.errstate(over="ignore"):
            np.multiply(numbers, _E8M0[scales[part]][..., None], out=values[part].reshape(numbers.shape))

    rows_in_parallel(convert, rows, values.shape[1], elements=_CONVERTED_AT_ONCE)
    return values


def to_ggml(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The same rows as GGML stores them, uint8 ``[rows, 17 * G]``."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    packed = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(len(scales), -1)


@dataclass(frozen=True)
class MXFP4Part:
    """Some rows of a matrix in a stack of them whose blocks and scales are two tensors (a
    :class:`~streamllm.models.tensor_source.TensorSource`).

    Attributes:
        name: of the two, less ``_blocks`` and ``_scales``.
        stack_shape: (matrices, rows, columns).
        entry: which matrix.
        rows: which rows of it.
    """

    name: str
    stack_shape: tuple[int, int, int]
    entry: int
    rows: slice = field(default_factory=lambda: slice(None))

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        count, rows, columns = self.stack_shape
        scales = (count, rows, columns // BLOCK)
        return {f"{self.name}_blocks": (*scales, BLOCK // 2), f"{self.name}_scales": scales}

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(range(*self.rows.indices(self.stack_shape[1]))), self.stack_shape[2])

    def format(self, checkpoint: Checkpoint) -> str:
        return "mxfp4"

    def num_bytes(self, checkpoint: Checkpoint) -> int:
        return self.shape[0] * self.shape[1] // BLOCK * (BLOCK // 2 + 1)

    def read(self, checkpoint: Checkpoint, rows: slice | None = None) -> npt.NDArray[np.float32]:
        return dequantize(*self._read(checkpoint, rows))

    def read_stored(self, checkpoint: Checkpoint, rows: slice | None = None) -> StoredRows:
        return StoredRows("mxfp4", to_ggml(*self._read(checkpoint, rows)))

    def _read(self, checkpoint: Checkpoint, rows: slice | None) -> list[npt.NDArray[np.uint8]]:
        """Blocks and scales of the rows."""
        chosen = self.rows if rows is None else rows_of_rows(self.rows, self.stack_shape[1], rows)
        parts = []
        for name, shape in self.stored.items():
            stored = checkpoint.read_stored(name)
            if stored.format != "u8":
                raise ModelLoadError(
                    f"The tensor {name} has the type {stored.format}; blocks and scales of MXFP4 are uint8."
                )
            parts.append(stored.data.reshape(shape)[self.entry, chosen])
        return parts
