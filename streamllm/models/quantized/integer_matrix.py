"""Matrices of integers that are quantised in groups, whatever file format they come in.

GPTQ, AWQ and compressed-tensors say the same of an element, ``scale * (code - zero)`` with a scale and a zero
point for each group of its row, and differ in where the bits lie. A reader of theirs hands over codes, scales
and zero points; here they become rows that stay packed (``int4_128`` and its like), or float32 where columns
that follow each other do not share their factors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from streamllm.errors import ModelLoadError
from streamllm.models.dequantize import to_float32
from streamllm.models.parallel import in_parallel, parts_of
from streamllm.models.tensor_source import TensorSource
from streamllm.ops.integer_rows import BLOCKS, integer_format, integer_row_bytes, pack_integers
from streamllm.ops.stored_rows import StoredRows

if TYPE_CHECKING:
    from streamllm.models.checkpoint import Checkpoint

logger = logging.getLogger("streamllm.models")

T = TypeVar("T", bound=np.generic)

_CONVERTED_AT_ONCE = 1 << 19
_ROW_STEP = 32
"""Parts begin at multiples of it: some formats have several rows in a word."""
_INTEGER_DTYPES = {"i8": "<i1", "u8": "<u1", "i32": "<i4", "i64": "<i8"}

Codes = Callable[[slice], npt.NDArray[np.uint8]]
"""Makes the codes of some rows, ``[rows, columns]``. The slice begins at a multiple of 32 and ends at one or
with the matrix."""


@dataclass(frozen=True)
class GroupFactors:
    """What the codes of a matrix stand for.

    Attributes:
        scales: float32 ``[rows, groups]``.
        zeros: integers ``[rows, groups]``: the codes that stand for 0; ``None``: the middle of the codes.
    """

    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.integer] | None


class IntegerLayout(Protocol):
    """Where a file format has the parts of one matrix.

    Attributes:
        stored: the tensors of the files, and the shapes that they must have.
    """

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]: ...

    def codes(self, checkpoint: Checkpoint) -> Codes: ...

    def factors(self, checkpoint: Checkpoint) -> GroupFactors: ...


@dataclass(frozen=True, eq=False)
class IntegerMatrix:
    """A matrix of codes of 4 or 8 bits (a :class:`~streamllm.models.tensor_source.TensorSource`).

    Attributes:
        layout: where its parts are.
        shape: rows (outputs) and columns (inputs).
        bits: of a code.
        groups: the group of each column, integers ``[columns]``.
        block: columns that a block of it has when it stays packed; 0: it cannot.
    """

    layout: IntegerLayout
    shape: tuple[int, int]
    bits: int
    groups: npt.NDArray[np.integer]
    block: int

    @classmethod
    def of(
        cls, layout: IntegerLayout, shape: tuple[int, int], bits: int, groups: npt.NDArray[np.integer]
    ) -> IntegerMatrix:
        """One in the largest blocks in which all columns share their factors."""
        return cls(layout, shape, bits, groups, _largest_block(groups))

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        return self.layout.stored

    def format(self, checkpoint: Checkpoint) -> str:
        return integer_format(self.bits, self.block) if self.block else "float32"

    def num_bytes(self, checkpoint: Checkpoint) -> int:
        rows, columns = self.shape
        if not self.block:
            return 4 * rows * columns
        return rows * integer_row_bytes(self.bits, self.block, columns)

    def read(self, checkpoint: Checkpoint, rows: slice | None = None) -> npt.NDArray[np.float32]:
        if self.block:
            return to_float32(self.read_stored(checkpoint, rows), next(iter(self.stored)))
        codes, scales, zeros = self._read(checkpoint)
        window = _Window.around(rows, self.shape[0])
        values = np.empty((len(window), self.shape[1]), np.float32)

        def convert(part: slice) -> None:
            numbers = values[window.place_of(part)]
            numbers[...] = codes(part)
            numbers -= zeros[part][:, self.groups]
            numbers *= scales[part][:, self.groups]

        self._in_parts(convert, window)
        return window.wanted(values)

    def read_stored(self, checkpoint: Checkpoint, rows: slice | None = None) -> StoredRows:
        if not self.block:
            return StoredRows("float32", self.read(checkpoint, rows).view(np.uint8))
        codes, scales, zeros = self._read(checkpoint)
        group_of_block = self.groups[:: self.block]
        middle = np.float32(1 << (self.bits - 1))
        window = _Window.around(rows, self.shape[0])
        data = np.empty((len(window), integer_row_bytes(self.bits, self.block, self.shape[1])), np.uint8)

        def convert(part: slice) -> None:
            own_scales = scales[part][:, group_of_block]
            minima = own_scales * (middle - zeros[part][:, group_of_block])
            pack_integers(codes(part), own_scales, minima, self.bits, data[window.place_of(part)])

        self._in_parts(convert, window)
        return StoredRows(self.format(checkpoint), window.wanted(data))

    def _read(self, checkpoint: Checkpoint) -> tuple[Codes, npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Codes, scales and zero points."""
        factors = self.layout.factors(checkpoint)
        shape = (self.shape[0], int(self.groups.max()) + 1)
        zeros = np.float32(1 << (self.bits - 1)) if factors.zeros is None else factors.zeros
        return (
            self.layout.codes(checkpoint),
            np.broadcast_to(factors.scales, shape),
            np.broadcast_to(np.asarray(zeros, np.float32), shape),
        )

    def _in_parts(self, convert: Callable[[slice], None], window: _Window) -> None:
        step = max(_CONVERTED_AT_ONCE // self.shape[1] // _ROW_STEP, 1) * _ROW_STEP
        parts = parts_of(len(window), step)
        in_parallel(convert, [slice(window.start + p.start, window.start + p.stop) for p in parts])


@dataclass(frozen=True)
class _Window:
    """Rows that are converted for the sake of some of them.

    Attributes:
        start, stop: borders of parts as :data:`Codes` has them.
        rows: those that are wanted.
    """

    start: int
    stop: int
    rows: slice

    @classmethod
    def around(cls, rows: slice | None, count: int) -> _Window:
        rows = rows or slice(0, count)
        start, stop = rows.start // _ROW_STEP * _ROW_STEP, -(-rows.stop // _ROW_STEP) * _ROW_STEP
        return cls(start, min(stop, count), rows)

    def __len__(self) -> int:
        return self.stop - self.start

    def place_of(self, part: slice) -> slice:
        """Where rows of the matrix lie in what is converted."""
        return slice(part.start - self.start, part.stop - self.start)

    def wanted(self, converted: npt.NDArray[T]) -> npt.NDArray[T]:
        return converted[self.place_of(self.rows)]


def groups_of(columns: int, group_size: int | None) -> npt.NDArray[np.integer]:
    """The group of each column where groups follow each other; ``None``: one group for all."""
    return np.arange(columns) // (group_size or columns)


def num_groups(columns: int, group_size: int | None) -> int:
    """Groups of a row; the last may be shorter."""
    return -(-columns // (group_size or columns))


def read_groups(checkpoint: Checkpoint, name: str, columns: int, groups: int) -> npt.NDArray[np.integer]:
    """The stored group of each column.

    Raises:
        ModelLoadError: there are not ``columns``, or one is of none of the ``groups`` groups.
    """
    if checkpoint.shape(name) != (columns,):
        raise ModelLoadError(
            f"The tensor {name} has shape {list(checkpoint.shape(name))}; its matrix has {columns} columns."
        )
    index = read_integers(checkpoint, name)
    if index.min() < 0 or index.max() >= groups:
        raise ModelLoadError(
            f"The tensor {name} has groups from {index.min()} to {index.max()}; by the quantization_config "
            f"there are {groups}."
        )
    return index


def matrix_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """The shape of a stored matrix.

    Raises:
        ModelLoadError: the tensor is none, or an empty one.
    """
    shape = checkpoint.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise ModelLoadError(
            f"The tensor {name} has shape {list(shape)}; a quantised weight has rows and columns."
        )
    return shape[0], shape[1]


def warn_of_dense(sources: Mapping[str, TensorSource]) -> None:
    """Says once which matrices do not stay packed."""
    dense = [
        name for name, source in sources.items() if isinstance(source, IntegerMatrix) and not source.block
    ]
    if dense:
        logger.warning(
            "%d matrices such as %s have groups of scattered columns (desc_act, actorder) or of no whole "
            "blocks of 32 columns: they become float32; --quantization int8 makes them smaller again",
            len(dense), dense[0],
        )  # fmt: skip


def _largest_block(groups: npt.NDArray[np.integer]) -> int:
    for block in BLOCKS:
        if len(groups) % block == 0:
            blocks = groups.reshape(-1, block)
            if (blocks == blocks[:, :1]).all():
                return block
    return 0


def read_integers(checkpoint: Checkpoint, name: str) -> npt.NDArray[np.integer]:
    """A stored tensor of integers; a view of the file.

    Raises:
        ModelLoadError: it is missing or has another type.
    """
    stored = checkpoint.read_stored(name)
    if stored.format not in _INTEGER_DTYPES:
        raise ModelLoadError(
            f"The tensor {name} has the type {stored.format}; codes of quantised weights are integers "
            f"({', '.join(_INTEGER_DTYPES)})."
        )
    return stored.data.view(_INTEGER_DTYPES[stored.format]).reshape(checkpoint.shape(name))


def read_words(checkpoint: Checkpoint, name: str) -> npt.NDArray[np.uint32]:
    """A stored tensor of words of 32 bits that hold several codes each; a view of the file.

    Raises:
        ModelLoadError: it is missing or has another type.
    """
    words = read_integers(checkpoint, name)
    if words.dtype.itemsize != 4:
        raise ModelLoadError(
            f"The tensor {name} has integers of {8 * words.dtype.itemsize} bits; packed codes come in words "
            "of 32."
        )
    return words.view(np.uint32)


def unpack_words(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint8]:
    """The codes of each word from the lowest bits up, side by side along the last axis."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes
