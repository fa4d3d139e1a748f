"""Rows of a weight on a device: their tensors, and the way back to what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamllm.ops.gpu.weight_layout import IQ4_POLYNOMIAL, LANES, LAYOUTS, WeightLayout

_FACTOR_DTYPES = {"float16": torch.float16, "float32": torch.float32, "e8m0": torch.uint8}
_WORD_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of a weight in one format.

    Attributes:
        format: a name in :data:`streamllm.ops.gpu.weight_layout.LAYOUTS`, which says how they lie, or
            ``"dense"``.
        n, k: rows, and columns that count.
        values: the low plane, ``[tiles, n, 16]`` words of ``low_bits * values_per_lane`` bits (int16 or
            int32); of ``"dense"``, ``[n, k]`` in the activations' dtype.
        scales: ``[words, n, factors of a word]``, float16, float32 or uint8 (exponents), a block's each, zero
            beyond k; of formats with one a row float32 ``[n]``; of ``dense`` ``None``.
        minimums: shaped as ``scales``; ``None`` of formats without.
        high_bits: the high plane, ``[tiles, n, 16]`` words of ``high_bits * values_per_lane`` bits (int8 or
            int16), or ``None``.
        group_scales, group_minimums: uint8 ``[words, n, 4]``, a group's each, or ``None``.
    """

    format: str
    n: int
    k: int
    values: Tensor
    scales: Tensor | None = None
    minimums: Tensor | None = None
    high_bits: Tensor | None = None
    group_scales: Tensor | None = None
    group_minimums: Tensor | None = None

    @classmethod
    def allocate(cls, row_format: str, rows: int, columns: int, device: torch.device | str) -> WeightRows:
        """Room for rows in one of the quantised formats; factors are zero."""
        layout = LAYOUTS[row_format]
        tiles = -(-columns // layout.tile)

        def words(bits: int) -> Tensor | None:
            dtype = _WORD_DTYPES[bits * layout.values_per_lane] if bits else None
            return None if dtype is None else torch.empty(tiles, rows, LANES, dtype=dtype, device=device)

        def factors(elements: int, per_word: int, dtype: torch.dtype) -> Tensor:
            count = -(-tiles * layout.tile // (elements * per_word))
            return torch.zeros(count, rows, per_word, dtype=dtype, device=device)

        low = words(layout.low_bits)
        assert low is not None
        if layout.is_row_scaled:
            return cls(row_format, rows, columns, low, torch.zeros(rows, device=device))
        of_block = (layout.block, layout.factors_per_word, _FACTOR_DTYPES[layout.factor])
        return cls(
            row_format,
            rows,
            columns,
            low,
            factors(*of_block),
            factors(*of_block) if layout.minima else None,
            words(layout.high_bits),
            factors(layout.group, 4, torch.uint8) if layout.group else None,
            factors(layout.group, 4, torch.uint8) if layout.has_group_minima else None,
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by the name of their attribute."""
        named = {
            "values": self.values,
            "scales": self.scales,
            "minimums": self.minimums,
            "high_bits": self.high_bits,
            "group_scales": self.group_scales,
            "group_minimums": self.group_minimums,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes on the device, padding of k included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dequantize(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` (integers ``[m]``), float32 ``[m, k]``."""
        if self.scales is None:
            return self.values[ids].float()
        layout = LAYOUTS[self.format]
        values = _values(self._codes(ids, layout), layout)
        if layout.is_row_scaled:
            values *= self.scales[ids, None]
        else:
            # A last block may end within a tile's width.
            spans = values.unflatten(1, (-1, min(layout.span, layout.tile)))
            for factors, apply in zip(self._span_factors(ids, layout), (spans.mul_, spans.add_), strict=True):
                if factors is not None:
                    factors = factors.repeat_interleave(max(layout.span // layout.tile, 1), 1)
                    apply(factors[:, : spans.shape[1], None])
        return values[:, : self.k]

    def _span_factors(self, ids: Tensor, layout: WeightLayout) -> tuple[Tensor, Tensor | None]:
        """Scales and minima of some rows, float32 ``[m, spans or more]``."""
        factors = _of_rows(self.scales, ids)
        assert factors is not None
        scales = _half_powers(factors) if layout.factor == "e8m0" else factors.float()
        minimums = _of_rows(self.minimums, ids)
        if minimums is not None:
            minimums = minimums.float()
        integers = _of_rows(self.group_scales, ids)
        if integers is None:
            return scales, minimums
        group_minimums = _of_rows(self.group_minimums, ids)
        if layout.group_bits == 4:
            integers, group_minimums = integers & 15, integers >> 4
        groups = layout.block // layout.group
        scales = scales.repeat_interleave(groups, 1)[:, : integers.shape[1]]
        scales = scales * (integers.float() - layout.group_offset)
        if minimums is None or group_minimums is None:
            return scales, None
        return scales, minimums.repeat_interleave(groups, 1)[:, : group_minimums.shape[1]] * group_minimums

    def _codes(self, ids: Tensor, layout: WeightLayout) -> Tensor:
        """int32 ``[m, columns of the tiles]``."""
        codes = _lanes(self.values[:, ids], layout.low_bits)
        if self.high_bits is not None:
            codes |= _lanes(self.high_bits[:, ids], layout.high_bits) << layout.low_bits
        return codes.transpose(0, 1).flatten(1)


def set_codes(rows: WeightRows, codes: Tensor, start: int) -> None:
    """Puts the codes of some rows, uint8 ``[m, k]``, into the planes of ``rows`` from row ``start`` on; the
    last tile is padded with zeros."""
    layout = LAYOUTS[rows.format]
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % layout.tile))
    lanes = padded.view(len(codes), -1, layout.values_per_lane, LANES)
    end = start + len(codes)
    rows.values[:, start:end] = _words(lanes, 0, layout.low_bits)
    if rows.high_bits is not None:
        rows.high_bits[:, start:end] = _words(lanes, layout.low_bits, layout.high_bits)


def set_factors(factors: Tensor, stored: Tensor, start: int) -> None:
    """Puts the factors of some rows, ``[m, factors of a row]``, into one of :class:`WeightRows`' tensors from
    row ``start`` on."""
    words, _, per_word = factors.shape
    padded = torch.nn.functional.pad(stored, (0, words * per_word - stored.shape[1]))
    factors[:, start : start + len(stored)] = padded.view(len(stored), words, per_word).transpose(0, 1)


def _words(lanes: Tensor, first_bit: int, bits: int) -> Tensor:
    """A plane of codes ``[m, tiles, values_per_lane, 16]``: int32 ``[tiles, m, 16]``, of whose bits those
    count that the plane's words have."""
    words = torch.zeros_like(lanes[:, :, 0], dtype=torch.int32)
    for i in range(lanes.shape[2]):
        words |= (lanes[:, :, i] >> first_bit & ((1 << bits) - 1)).int() << i * bits
    return words.transpose(0, 1)


def _lanes(words: Tensor, bits: int) -> Tensor:
    """A plane's words ``[tiles, m, 16]`` as its part of the codes, int32 ``[tiles, m, values_per_lane,
    16]``."""
    shifts = torch.arange(0, 8 * words.itemsize, bits, dtype=torch.int32, device=words.device)
    return (words.int()[:, :, None] >> shifts[:, None]) & ((1 << bits) - 1)


def _of_rows(factors: Tensor | None, ids: Tensor) -> Tensor | None:
    """Factors of some rows, ``[m, factors of a row]``."""
    return None if factors is None else factors[:, ids].transpose(0, 1).flatten(1)


def _values(codes: Tensor, layout: WeightLayout) -> Tensor:
    """What codes stand for before they are scaled, float32. By arithmetic: a table would have to be copied
    to the device, which no graph can capture."""
    if layout.codes == "e4m3":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    if layout.codes == "e2m1":
        return ((codes & 8) << 28 | (codes & 7) << 22).view(torch.float32) * 2.0**127
    if layout.codes == "integer":
        return (codes - layout.offset).float()
    variable = 1 + codes.float() / 16
    value = torch.zeros_like(variable)
    for coefficient in IQ4_POLYNOMIAL:
        value = value * variable + coefficient
    return value.round()


def _half_powers(exponents: Tensor) -> Tensor:
    """Half of what e8m0 stands for, ``2^(e - 128)``, float32."""
    wide = exponents.int()
    return torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1) << 23).view(torch.float32)
