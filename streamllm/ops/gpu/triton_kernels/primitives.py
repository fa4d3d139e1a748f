"""Device functions that several kernels share: stored values and activations to float32 and back."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
"""The cache holds float32, float16 or bfloat16."""

FLOAT8_BITS = tl.constexpr(1)
"""The cache holds float8_e4m3fn, seen as uint8, and the GPU has no instruction that converts it."""

FLOAT8_NATIVE = tl.constexpr(2)
"""The cache holds float8_e4m3fn, seen as uint8, on a GPU that converts it (sm_89 and later): used where every
step reads, not where it writes once."""

INT8 = tl.constexpr(3)
"""The cache holds int8, and a float32 scale for each position and head."""

FLOAT8_MAX = tl.constexpr(448.0)
FLOAT16_MAX = tl.constexpr(65504.0)


def cache_format(plane: Any, architecture: str) -> int:
    """How kernels read and write a plane of the cache on ``architecture`` (``"sm_90"``)."""
    if plane.element_size() != 1:
        return PLAIN.value
    if not plane.is_floating_point():
        return INT8.value
    return FLOAT8_NATIVE.value if int(architecture.removeprefix("sm_")) >= 89 else FLOAT8_BITS.value


def as_stored(plane: Any) -> Any:
    """The plane as kernels take it: float8 as uint8, because Triton knows no e4m3 below sm_89."""
    import torch

    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane


@triton.jit
def from_stored(x, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Cached values as ``dtype``, int8 unscaled. Exact for both narrow ones: e4m3 is shifted to float16's
    place, 2^8 too small."""
    if FORMAT == FLOAT8_NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FORMAT == FLOAT8_BITS:
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = half.to(tl.float16, bitcast=True) * 256.0
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), values)
        return values.to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def saturate(x, limit: tl.constexpr):
    """``x`` within ``[-limit, limit]``; NaN stays NaN."""
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)


@triton.jit
def nearest_integer(x):
    """float32 within +-2^22, rounded to nearest even: the last place of 1.5 * 2^23 is 1."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_stored(x, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """float32 as the cache holds it, rounded to nearest even; float16 and float8 saturate, int8's magnitudes
    are within 127 before."""
    if FORMAT == INT8:
        return nearest_integer(x).to(dtype)
    elif FORMAT != PLAIN:
        return _float8_bits(saturate(x, FLOAT8_MAX))
    elif dtype == tl.float16:
        return saturate(x, FLOAT16_MAX).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _float8_bits(x):
    """e4m3 of float32 within +-448. Normal values: the mantissa is rounded to 3 bits and the exponent moved
    by 120. Below 2^-6: adding 2^14, whose last place is 2^-9, rounds to float8's smallest step."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.uint32, bitcast=True)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def tanh(x):
    """Within 1e-7; exp's argument is never positive, so nothing overflows."""
    decay = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0.0, -magnitude, magnitude)
