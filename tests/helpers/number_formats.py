"""The number formats of GPU tensors in numpy, also those that it lacks (bfloat16, float8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamllm.ops.gpu.cuda import library


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format.

    Attributes:
        code: what the CUDA kernels call it.
        storage: the numpy type that holds it: its bits, where numpy lacks the format.
        mantissa_bits: after the binary point.
        smallest_exponent: of a number that is not subnormal.
        largest: finite number.
        nan_bits: of a NaN.
    """

    name: str
    code: int
    storage: type[np.generic]
    mantissa_bits: int
    smallest_exponent: int
    largest: float
    nan_bits: int

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Numbers rounded to nearest, ties to even. Too large for float8: its largest; else infinity."""
        values = np.asarray(values, np.float32)
        if self.name == "bfloat16":
            bits = values.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
            return np.where(np.isnan(values), self.nan_bits, rounded).astype(np.uint16)
        if self.name == "float8_e4m3":
            magnitudes = _float8_magnitudes()
            wanted = np.fmin(np.abs(values), self.largest)
            above = np.searchsorted(magnitudes, wanted).clip(1, len(magnitudes) - 1)
            up, down = magnitudes[above] - wanted, wanted - magnitudes[above - 1]
            code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
            code = np.where(np.isnan(values), self.nan_bits, code)
            return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
        with np.errstate(over="ignore"):
            return values.astype(self.storage)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """As float64."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.name == "float8_e4m3":
            magnitude = np.append(_float8_magnitudes(), np.nan)[stored & 0x7F]
            return np.where(stored & 0x80, -magnitude, magnitude)
        return stored.astype(np.float64)

    def nan(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array of NaN, to see what does not get written."""
        return np.full(shape, self.nan_bits, f"u{np.dtype(self.storage).itemsize}").view(self.storage)

    def spacing(self, values: np.ndarray) -> np.ndarray:
        """The distance between the format's numbers around each value."""
        exponent = np.frexp(np.abs(values))[1] - 1
        return np.exp2(np.maximum(exponent, self.smallest_exponent) - float(self.mantissa_bits))


FLOAT32 = NumberFormat(
    "float32", library.FLOAT32, np.float32, 23, -126, float(np.finfo(np.float32).max), 0x7FC00000
)
FLOAT16 = NumberFormat("float16", library.FLOAT16, np.float16, 10, -14, 65504.0, 0x7E00)
BFLOAT16 = NumberFormat("bfloat16", library.BFLOAT16, np.uint16, 7, -126, (2 - 2.0**-7) * 2.0**127, 0x7FC0)
FLOAT8 = NumberFormat("float8_e4m3", library.FLOAT8_E4M3, np.uint8, 3, -6, 448.0, 0x7F)
INT8 = NumberFormat("int8", library.INT8, np.int8, 0, 0, 127.0, 99)
"""Of a cache alone, with scales (:mod:`helpers.int8_cache`)."""


def _float8_magnitudes() -> np.ndarray:
    """The numbers of codes 0 to 126 of float8 e4m3, which has no infinity; 127 is NaN."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))


def assert_rounds_to(
    stored: np.ndarray,
    expected: np.ndarray,
    number_format: NumberFormat,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-30,
) -> None:
    """A stored result is ``expected`` (float64), rounded to its format, up to an error of ``rtol`` before the
    rounding; NaN where NaN is expected and nowhere else."""
    actual = number_format.decode(stored)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), "NaN elsewhere than expected")
    with np.errstate(invalid="ignore"):
        allowed = number_format.spacing(expected) / 2 + rtol * np.abs(expected) + atol
        right = (np.abs(actual - expected) <= allowed) | (actual == expected) | np.isnan(expected)
    assert right.all(), (
        f"{(~right).sum()} of {right.size} wrong, the first at {np.argwhere(~right)[0]}: "
        f"{actual[~right][0]!r} instead of {expected[~right][0]!r}"
    )
