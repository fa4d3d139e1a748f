"""Tensors of a model that its files hold in another place or shape than ``load_weights`` asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.dequantize import FLOAT_DTYPES, floats, to_float32
from streamllm.ops.stored_rows import StoredRows

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

T = TypeVar("T", bound=np.generic)


class TensorSource(Protocol):
    """What one tensor of a model is made from. The methods are those of
    :class:`~streamllm.models.checkpoint.Checkpoint` for this tensor, ``checkpoint`` being the files.

    Attributes:
        stored: the tensors of the files that it comes from, and the shapes that they must have.
        shape: its own.
    """

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def format(self, checkpoint: Checkpoint) -> str: ...

    def num_bytes(self, checkpoint: Checkpoint) -> int: ...

    def read(self, checkpoint: Checkpoint, rows: slice | None = None) -> npt.NDArray[np.float32]: ...

    def read_stored(self, checkpoint: Checkpoint, rows: slice | None = None) -> StoredRows: ...


def rows_of_rows(chosen: slice, count: int, rows: slice) -> slice:
    """Which of ``count`` rows those are that stand at ``rows`` among the chosen ones."""
    part = range(*chosen.indices(count))[rows]
    return slice(part.start, part.stop, part.step)


@dataclass(frozen=True)
class TensorPart:
    """A part of a stored tensor, or all of it transposed (a :class:`TensorSource`).

    Attributes:
        name: of the stored tensor.
        stored_shape: the shape that it must have.
        entry: of a stack of tensors, the number of the one that is meant.
        transposed: a matrix is stored ``[inputs, outputs]``.
        rows: which rows of the matrix, once it stands right; of a vector, which elements.
        is_row: a vector is meant as a matrix of one row (ggml drops leading dimensions of 1).
    """

    name: str
    stored_shape: tuple[int, ...]
    entry: int | None = None
    transposed: bool = False
    rows: slice = field(default_factory=lambda: slice(None))
    is_row: bool = False

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        return {self.name: self.stored_shape}

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored_shape if self.entry is None else self.stored_shape[1:]
        if self.transposed:
            shape = shape[::-1]
        shape = (len(range(*self.rows.indices(shape[0]))), *shape[1:])
        return (1, *shape) if self.is_row else shape

    def format(self, checkpoint: Checkpoint) -> str:
        return checkpoint.format(self.name)

    def num_bytes(self, checkpoint: Checkpoint) -> int:
        return checkpoint.num_bytes(self.name) * math.prod(self.shape) // math.prod(self.stored_shape)

    def read(self, checkpoint: Checkpoint, rows: slice | None = None) -> npt.NDArray[np.float32]:
        if rows is not None:
            return self._part(rows).read(checkpoint)
        stored = checkpoint.read_stored(self.name)
        if stored.format in FLOAT_DTYPES:
            return floats(self._pick_floats(stored), stored.format)
        return to_float32(self._pick_rows(stored), self.name).reshape(self.shape)

    def read_stored(self, checkpoint: Checkpoint, rows: slice | None = None) -> StoredRows:
        if rows is not None:
            return self._part(rows).read_stored(checkpoint)
        stored = checkpoint.read_stored(self.name)
        if stored.format not in FLOAT_DTYPES:
            return self._pick_rows(stored)
        picked = np.ascontiguousarray(self._pick_floats(stored))
        return StoredRows(stored.format, picked.view(np.uint8).reshape(self.shape[0], -1))

    def _part(self, rows: slice) -> TensorPart:
        if self.is_row:
            return self
        shape = self.stored_shape if self.entry is None else self.stored_shape[1:]
        count = shape[-1] if self.transposed else shape[0]
        return replace(self, rows=rows_of_rows(self.rows, count, rows))

    def _pick_floats(self, stored: StoredRows) -> npt.NDArray[np.generic]:
        values = stored.data.view(FLOAT_DTYPES[stored.format])
        return self._pick(values.reshape(self.stored_shape)).reshape(self.shape)

    def _pick_rows(self, stored: StoredRows) -> StoredRows:
        if self.transposed or len(self.shape) < 2:
            raise ModelLoadError(
                f"The tensor {self.name} has the type {stored.format}, which cannot be taken apart."
            )
        rows = stored.data.reshape(*self.stored_shape[:-1], -1)
        return StoredRows(stored.format, np.ascontiguousarray(self._pick(rows)))

    def _pick(self, values: npt.NDArray[T]) -> npt.NDArray[T]:
        if self.entry is not None:
            values = values[self.entry]
        return (values.T if self.transposed else values)[self.rows]
