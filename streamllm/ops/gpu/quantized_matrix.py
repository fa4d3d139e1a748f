"""Quantised weights on a device, laid out for the matrix product kernels.

A file holds a group's factors beside its values; here they lie apart. Values are packed into 32-bit words,
and the words are cut into tiles of 16 of each row. The tiles of all rows that stand at the same place along k
lie side by side: what a program reads at a time is contiguous, however many rows it takes. Value i of word j
in tile t is element ``(t * values_per_word + i) * 16 + j`` of its row: the i-th values of a tile's words are
neighbours along k and share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from streamllm.ops.stored_rows import StoredRows

RowFormat = Literal["dense", "q4_0", "q4_1", "q8_0", "int8", "float8_e4m3"]

PACKED_FORMATS = frozenset({"q4_0", "q4_1", "q8_0"})
"""Formats of a file that stay quantised."""

GROUP = 32
"""Elements that share a scale in GGML's formats."""

WORDS = 16
"""Words of a row in a tile."""

_GROUP_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
_DENSE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ROWS_AT_A_TIME = 16384
_FLOAT8_MAX = 448.0
_FLOAT8_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of a weight in one format.

    Attributes:
        format: that format.
        n, k: rows, and columns that count.
        values: int32 ``[tiles, n, 16]``; of ``"dense"``, ``[n, k]`` in the activations' dtype. Codes are
            unsigned: 8 (of ``q4_0``) or 128 (of ``q8_0`` and ``int8``) more than what they stand for.
        scales: float16 ``[pairs, n, 2]``, of two groups that follow each other along k, zero beyond k; of
            ``int8`` and ``float8_e4m3`` float32 ``[n]``; of ``dense`` ``None``.
        minimums: of ``q4_1``, shaped as ``scales``; otherwise ``None``.
    """

    format: RowFormat
    n: int
    k: int
    values: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device, padding of k included."""
        tensors = (self.values, self.scales, self.minimums)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` (integers ``[m]``), float32 ``[m, k]``."""
        if self.scales is None:
            return self.values[ids].float()
        values = self._unpacked(ids)
        if self.scales.dim() == 1:
            values *= self.scales[ids, None]
        else:
            groups = values.view(len(ids), -1, GROUP)
            groups *= _factors(self.scales, ids)
            if self.minimums is not None:
                groups += _factors(self.minimums, ids)
        return values[:, : self.k]

    def _unpacked(self, ids: Tensor) -> Tensor:
        """What the codes of some rows stand for, float32 ``[m, columns of the tiles]``."""
        stored = self.values[:, ids].transpose(0, 1).contiguous().view(torch.uint8)
        stored = stored.view(len(ids), -1, WORDS, 4).transpose(2, 3)
        if self.format in ("q4_0", "q4_1"):
            stored = torch.stack([stored & 15, stored >> 4], dim=3)
        elif self.format == "float8_e4m3":
            stored = stored.contiguous().view(torch.float8_e4m3fn)
        zero = {"q4_0": 8, "q8_0": 128, "int8": 128}.get(self.format, 0)
        return stored.float().reshape(len(ids), -1) - zero


class QuantizedMatrix:
    """A weight ``W [n, k]`` on a device, as one piece for each run of rows in one format, with its bias.

    Args:
        pieces: at least one, all of one ``k`` and on one device, in the order of the rows.
        bias: float32 ``[n]``, or ``None``.
    """

    def __init__(self, pieces: Iterable[WeightRows], bias: Tensor | None = None):
        self.pieces = tuple(pieces)
        self.bias = bias
        self.shape = sum(piece.n for piece in self.pieces), self.pieces[0].k

    @classmethod
    def from_parts(
        cls,
        rows: int,
        columns: int,
        parts: Iterable[np.ndarray | StoredRows],
        device: torch.device | str,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> QuantizedMatrix:
        """A weight of parts stacked to ``rows`` rows, taken one at a time and repacked on the device.

        Args:
            parts: rows in one of :data:`PACKED_FORMATS`, which stay quantised, or in float32, float16 or
                bfloat16.
            dtype: of the activations, and of parts that are not quantised.

        Raises:
            ValueError: a part does not fit or is in another format, or rows are missing.
        """
        packers: list[_Packer] = []
        num_rows = 0
        for part in parts:
            if num_rows + part.shape[0] > rows or part.shape[1] != _row_size(part, columns):
                raise ValueError(f"a part of shape {part.shape} does not fit a weight [{rows}, {columns}]")
            if not packers or packers[-1].format != _format(part):
                packers.append(_Packer(_format(part), rows - num_rows, columns, device, dtype))
            packers[-1].append(part)
            num_rows += part.shape[0]
        if num_rows != rows or not packers:
            raise ValueError(f"the parts of a weight [{rows}, {columns}] have {num_rows} rows")
        return cls((packer.finish() for packer in packers), bias)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(piece.nbytes for piece in self.pieces) + (0 if self.bias is None else self.bias.nbytes)

    def dequantize_rows(self, ids: Tensor) -> Tensor:
        """``W[ids]``: float32 ``[m, k]``, of integers ``ids [m]`` on the device; only they are read.

        No size depends on the ids' values, so that a graph can capture it.
        """
        out = self.pieces[0].dequantize(ids.clamp(max=self.pieces[0].n - 1))
        start = self.pieces[0].n
        for piece in self.pieces[1:]:
            rows = piece.dequantize((ids - start).clamp(0, piece.n - 1))
            out = torch.where((ids >= start)[:, None], rows, out)
            start += piece.n
        return out

    def gather(self, out: Tensor, ids: Tensor) -> None:
        """``out = W[ids]``."""
        out.copy_(self.dequantize_rows(ids))

    def multiply(self, out: Tensor, x: Tensor) -> None:
        """``out = x @ W.T + bias``; ``out`` may be float32 where ``x`` is not.

        On a GPU by the Triton kernel; on a CPU, where it runs only interpreted, in float32 by torch.
        """
        if x.device.type != "cpu":
            from streamllm.ops.gpu.triton_kernels.matmul import quantized_linear

            quantized_linear(out, x, self)
            return
        weight = torch.cat([piece.dequantize(torch.arange(piece.n)) for piece in self.pieces])
        out.copy_(functional.linear(x.float(), weight, self.bias))


class _Packer:
    """Collects rows that are stored in one format in tensors with room for ``max_rows``."""

    def __init__(
        self,
        row_format: RowFormat,
        max_rows: int,
        columns: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        self.format = row_format
        self._columns = columns
        self._num_rows = 0
        self._factors: list[Tensor] = []
        if row_format == "dense":
            self._values = torch.empty(max_rows, columns, dtype=dtype, device=device)
            return
        tile = WORDS * (8 if row_format in ("q4_0", "q4_1") else 4)
        tiles = math.ceil(columns / tile)
        self._values = torch.empty(tiles, max_rows, WORDS, dtype=torch.int32, device=device)
        pairs = tiles * tile // (2 * GROUP)
        self._factors = [
            torch.zeros(pairs, max_rows, 2, dtype=torch.float16, device=device)
            for _ in range(2 if row_format == "q4_1" else 1)
        ]

    def append(self, part: np.ndarray | StoredRows) -> None:
        """Adds rows."""
        data = part.data if isinstance(part, StoredRows) else part
        for chunk in _row_chunks(data):
            start, end = self._num_rows, self._num_rows + len(chunk)
            rows = torch.from_numpy(chunk).to(self._values.device)
            if self.format == "dense":
                stored = rows.view(_DENSE_DTYPES[part.format]) if isinstance(part, StoredRows) else rows
                self._values[start:end] = stored
            else:
                self._append_groups(rows.view(len(chunk), self._columns // GROUP, -1), start, end)
            self._num_rows = end

    def _append_groups(self, groups: Tensor, start: int, end: int) -> None:
        """Adds GGML's groups, uint8 ``[rows, groups, bytes of one]``: factors in float16, then values."""
        for i, factors in enumerate(self._factors):
            stored = groups[..., 2 * i : 2 * i + 2].contiguous().view(torch.float16)[..., 0]
            factors[:, start:end] = _padded(stored, 2 * len(factors)).view(len(groups), -1, 2).transpose(0, 1)
        values = groups[..., 2 * len(self._factors) :]
        if self.format == "q8_0":
            self._values[:, start:end] = _words((values ^ 0x80).flatten(1), 8)
        else:
            self._values[:, start:end] = _words(torch.cat([values & 15, values >> 4], -1).flatten(1), 4)

    def finish(self) -> WeightRows:
        """What was collected, without room for more."""
        tensors = [self._values, *self._factors]
        if self.format == "dense":
            tensors = [self._values[: self._num_rows]]
        elif self._num_rows < self._values.shape[1]:
            tensors = [tensor[:, : self._num_rows].contiguous() for tensor in tensors]
        return WeightRows(self.format, self._num_rows, self._columns, *tensors)


def quantize_int8(weight: Tensor) -> WeightRows:
    """A finite weight ``[n, k]`` as int8, each row scaled so that its largest magnitude is 127."""
    rows = weight.float()
    scales = rows.abs().amax(1) / 127
    codes = (rows / _divisors(scales)).round() + 128
    return _row_scaled("int8", codes.to(torch.uint8), scales)


def quantize_float8(weight: Tensor) -> WeightRows:
    """A finite weight ``[n, k]`` as float8 e4m3, each row scaled so that its largest magnitude is 448."""
    rows = weight.float()
    scales = rows.abs().amax(1) / _FLOAT8_MAX
    scaled = (rows / _divisors(scales)).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
    return from_float8(scaled.to(torch.float8_e4m3fn), scales)


def from_float8(values: Tensor, scales: Tensor) -> WeightRows:
    """A weight that is stored as float8: ``values`` float8_e4m3fn ``[n, k]``, ``scales`` ``[n]`` or one for
    all.

    The kernel knows no NaN among values: a row that holds one has NaN as its scale.
    """
    patterns = values.view(torch.uint8)
    row_scales = scales.float().reshape(-1).expand(len(values)).clone()
    row_scales[((patterns & _FLOAT8_NAN) == _FLOAT8_NAN).any(1)] = math.nan
    return _row_scaled("float8_e4m3", patterns, row_scales)


def _row_scaled(row_format: RowFormat, codes: Tensor, scales: Tensor) -> WeightRows:
    n, k = codes.shape
    return WeightRows(row_format, n, k, _words(codes, 8).contiguous(), scales)


def _divisors(scales: Tensor) -> Tensor:
    """``scales [n, 1]`` where a row of zeros does not divide by zero."""
    return torch.where(scales > 0, scales, 1)[:, None]


def _format(part: np.ndarray | StoredRows) -> RowFormat:
    """The format that a part gets on the device."""
    if isinstance(part, StoredRows) and part.format in PACKED_FORMATS:
        return cast(RowFormat, part.format)
    return "dense"


def _row_size(part: np.ndarray | StoredRows, columns: int) -> int:
    """How long a row of a part must be: in bytes, or of an array in elements.

    Raises:
        ValueError: no weight can have the part's format.
    """
    if not isinstance(part, StoredRows):
        return columns
    if part.format in _DENSE_DTYPES:
        return columns * _DENSE_DTYPES[part.format].itemsize
    if part.format not in PACKED_FORMATS or columns % GROUP:
        raise ValueError(f"rows of {columns} elements stored as {part.format} must be dequantised")
    return columns // GROUP * _GROUP_BYTES[part.format]


def _row_chunks(data: np.ndarray) -> Iterator[np.ndarray]:
    """Writable copies of some rows at a time: bounds what repacking takes on the device."""
    for start in range(0, len(data), _ROWS_AT_A_TIME):
        yield np.array(data[start : start + _ROWS_AT_A_TIME])


def _factors(pairs: Tensor, ids: Tensor) -> Tensor:
    """The factors of some rows, float32 ``[m, groups, 1]``."""
    return pairs[:, ids].transpose(0, 1).reshape(len(ids), -1, 1).float()


def _padded(rows: Tensor, multiple: int) -> Tensor:
    return functional.pad(rows, (0, -rows.shape[1] % multiple))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes of 4 or 8 bits, uint8 ``[rows, k]``, as ``[tiles, rows, 16]`` words; the last tile is padded."""
    per_word = 32 // bits
    stored = _padded(codes, WORDS * per_word).view(len(codes), -1, per_word, WORDS)
    if bits == 4:
        stored = stored[:, :, 0::2] | stored[:, :, 1::2] << 4
    return stored.transpose(2, 3).contiguous().view(torch.int32)[..., 0].transpose(0, 1)
