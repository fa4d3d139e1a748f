"""Quantised weights on a device: made of a file's rows, gathered and multiplied.

How they lie there is told in :mod:`streamllm.ops.gpu.weight_layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from streamllm.ops.gpu.stored_blocks import row_bytes, take_apart
from streamllm.ops.gpu.weight_layout import PACKED_FORMATS
from streamllm.ops.gpu.weight_rows import WeightRows, set_codes, set_factors
from streamllm.ops.stored_rows import StoredRows

_DENSE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ELEMENTS_AT_A_TIME = 1 << 24
_FLOAT8_MAX = 448.0
_FLOAT8_NAN = 0x7F


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
        row_format: str,
        max_rows: int,
        columns: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        self.format = row_format
        self._num_rows = 0
        if row_format == "dense":
            values = torch.empty(max_rows, columns, dtype=dtype, device=device)
            self._rows = WeightRows("dense", max_rows, columns, values)
        else:
            self._rows = WeightRows.allocate(row_format, max_rows, columns, device)

    def append(self, part: np.ndarray | StoredRows) -> None:
        """Adds rows."""
        data = part.data if isinstance(part, StoredRows) else part
        for chunk in _row_chunks(data, self._rows.k):
            rows = torch.from_numpy(chunk).to(self._rows.values.device)
            if self.format == "dense":
                stored = rows.view(_DENSE_DTYPES[part.format]) if isinstance(part, StoredRows) else rows
                self._rows.values[self._num_rows : self._num_rows + len(chunk)] = stored
            else:
                self._append_blocks(rows)
            self._num_rows += len(chunk)

    def _append_blocks(self, rows: Tensor) -> None:
        """Adds stored rows, uint8 ``[rows, bytes of one]``."""
        start, parts = self._num_rows, take_apart(self.format, rows, self._rows.k)
        set_codes(self._rows, parts.codes.flatten(1), start)
        for name in ("scales", "minimums", "group_scales", "group_minimums"):
            factors = getattr(parts, name)
            if factors is not None:
                set_factors(getattr(self._rows, name), factors.flatten(1), start)

    def finish(self) -> WeightRows:
        """What was collected, without room for more."""
        if self._num_rows == self._rows.n:
            return self._rows
        axis = 0 if self.format == "dense" else 1
        kept: dict[str, Any] = {
            name: tensor.narrow(axis, 0, self._num_rows).clone(memory_format=torch.contiguous_format)
            for name, tensor in self._rows.tensors.items()
        }
        return replace(self._rows, n=self._num_rows, **kept)


def quantize_int8(weight: Tensor) -> WeightRows:
    """A finite weight ``[n, k]`` as int8, each row scaled so that its largest magnitude is 127."""
    rows = weight.float()
    scales = rows.abs().amax(1) / 127
    codes = (rows / _divisors(scales)).round() + 128
    return _row_scaled("int8_row", codes.to(torch.uint8), scales)


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
    return _row_scaled("float8_row", patterns, row_scales)


def _row_scaled(row_format: str, codes: Tensor, scales: Tensor) -> WeightRows:
    n, k = codes.shape
    rows = replace(WeightRows.allocate(row_format, n, k, codes.device), scales=scales)
    set_codes(rows, codes, 0)
    return rows


def _divisors(scales: Tensor) -> Tensor:
    """``scales [n, 1]`` where a row of zeros does not divide by zero."""
    return torch.where(scales > 0, scales, 1)[:, None]


def _format(part: np.ndarray | StoredRows) -> str:
    """The format that a part gets on the device."""
    return part.format if isinstance(part, StoredRows) and part.format in PACKED_FORMATS else "dense"


def _row_size(part: np.ndarray | StoredRows, columns: int) -> int:
    """How long a row of a part must be: in bytes, or of an array in elements.

    Raises:
        ValueError: no weight can have the part's format.
    """
    if not isinstance(part, StoredRows):
        return columns
    if part.format in _DENSE_DTYPES:
        return columns * _DENSE_DTYPES[part.format].itemsize
    return row_bytes(part.format, columns)


def _row_chunks(data: np.ndarray, columns: int) -> Iterator[np.ndarray]:
    """Writable copies of some rows at a time: bounds what repacking takes on the device."""
    rows = max(_ELEMENTS_AT_A_TIME // columns, 1)
    for start in range(0, len(data), rows):
        yield np.array(data[start : start + rows])
