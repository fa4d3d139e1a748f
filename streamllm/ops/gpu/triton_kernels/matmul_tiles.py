"""What the matrix product kernels are made of: a tile of the weight times a tile of the activations.

A weight tile ``[BLOCK_N, K]`` stands on the left and the activations' rows are columns of the right operand,
so that the matrix units see the weight as their M side whatever the number of rows. How quantised weights lie
in memory is told in :mod:`streamllm.ops.gpu.weight_layout`; kernels are compiled for one layout.

Few rows are bound by reading the weight, if no more than a few instructions go into making a float of each
stored value. So a code is put into the mantissa of 1.0, which takes a shift and one logical operation a
plane, and one multiply-add makes the weight of it. That is as exact as a conversion: scales have 19 bits at
most (a float16 times an integer of 8 bits) and codes 8; those of float32 are rounded as in any product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from streamllm.ops.gpu.weight_layout import IQ4_POLYNOMIAL, LANES

STEP = tl.constexpr(LANES)
"""Columns along k of one matrix instruction: one value of each lane of a tile of a quantised weight."""

TO_NEAREST_INTEGER = tl.constexpr(1.5 * 2**23)
"""What a float32 of small magnitude is added to so that the sum ends at its ones."""

IQ4_4 = tl.constexpr(IQ4_POLYNOMIAL[0])
IQ4_3 = tl.constexpr(IQ4_POLYNOMIAL[1])
IQ4_2 = tl.constexpr(IQ4_POLYNOMIAL[2])
IQ4_1 = tl.constexpr(IQ4_POLYNOMIAL[3])
IQ4_0 = tl.constexpr(IQ4_POLYNOMIAL[4])


class WeightTensors(NamedTuple):
    """The tensors of :class:`streamllm.ops.gpu.weight_rows.WeightRows` as kernels take them: factors as words
    of 32 bits, but float32 where there is one a row."""

    low: Any
    high: Any
    scales: Any
    minimums: Any
    group_scales: Any
    group_minimums: Any


@triton.jit
def tile_of(program, tiles_n, tiles_rows, TILES_IN_CACHE: tl.constexpr):
    """The tile along n, and that of rows, of a program. The row tiles of TILES_IN_CACHE tiles along n follow
    each other, so that what they read stays in cache."""
    per_group = TILES_IN_CACHE * tiles_rows
    first_tile = program // per_group * TILES_IN_CACHE
    group_size = tl.minimum(tiles_n - first_tile, TILES_IN_CACHE)
    return first_tile + program % per_group % group_size, program % per_group // group_size


@triton.jit
def load_rows(x, row, rows, k_offset, k, x_stride):
    """``x[row, k_offset]`` transposed, ``[K, rows]``, with zeros beyond either edge."""
    pointers = x + row.to(tl.int64)[None, :] * x_stride + k_offset[:, None]
    return tl.load(pointers, mask=(row < rows)[None, :] & (k_offset < k)[:, None], other=0.0)


@triton.jit
def load_plane(plane, tile, column, n):
    """A tile's words of one plane, ``[BLOCK_N, lanes]``; zeros beyond the last column."""
    pointers = (
        plane + tl.cast(tile, tl.int64) * n * STEP + column[:, None] * STEP + tl.arange(0, STEP)[None, :]
    )
    return tl.load(pointers, mask=(column < n)[:, None], other=0).to(tl.int32)


@triton.jit
def load_words(factors, word, column, n):
    """One word of factors of each row, int32 ``[BLOCK_N, 1]``; zeros beyond the last column."""
    return tl.load(factors + tl.cast(word, tl.int64) * n + column, mask=column < n, other=0)[:, None]


@triton.jit
def moved_bits(words, i: tl.constexpr, BITS: tl.constexpr, TO: tl.constexpr):
    """The i-th code of BITS bits of each word, its lowest bit at bit TO."""
    RIGHT: tl.constexpr = i * BITS - TO
    moved = words >> RIGHT if RIGHT > 0 else words << -RIGHT
    MASK: tl.constexpr = ((1 << BITS) - 1) << TO
    return moved & MASK


@triton.jit
def code_in_mantissa(words, i: tl.constexpr, BITS: tl.constexpr):
    """``1 + code / 2^BITS`` of the i-th unsigned code of each word."""
    return (moved_bits(words, i, BITS, 23 - BITS) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def float8_value(words, i: tl.constexpr):
    """The i-th e4m3 value of each word, in float32: sign, exponent and mantissa moved to their place, which
    makes it 2^120 times too small. NaN is not among them."""
    moved = words << (24 - 8 * i)
    bits = (moved & -0x80000000) | ((moved >> 4) & 0x07F00000)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def doubled_float4_value(words, i: tl.constexpr):
    """Twice the i-th e2m1 value of each word, in float32, likewise: 2^127 times too small."""
    moved = words << (28 - 4 * i)
    bits = (moved & -0x80000000) | ((moved >> 6) & 0x01C00000)
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38


@triton.jit
def iq4_value(words, i: tl.constexpr):
    """What the i-th code of each word stands for in IQ4's types, in float32."""
    variable = code_in_mantissa(words, i, 4)
    value = tl.fma(variable, tl.full(variable.shape, IQ4_4, tl.float32), IQ4_3)
    value = tl.fma(value, variable, IQ4_2)
    value = tl.fma(value, variable, IQ4_1)
    value = tl.fma(value, variable, IQ4_0 + TO_NEAREST_INTEGER)
    return value - TO_NEAREST_INTEGER


@triton.jit
def integer_value(low, high, i: tl.constexpr, LAYOUT: tl.constexpr):
    """``1 + code / 2^bits`` of the i-th code, whose bits are in one plane or two."""
    FIRST: tl.constexpr = 23 - LAYOUT.bits
    bits = moved_bits(low, i, LAYOUT.low_bits, FIRST)
    if LAYOUT.high_bits:
        bits |= moved_bits(high, i, LAYOUT.high_bits, FIRST + LAYOUT.low_bits)
    return (bits | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def block_factor(factors, tile, i: tl.constexpr, column, n, LAYOUT: tl.constexpr):
    """The factors of the block that the i-th values of a tile are in, float32 ``[BLOCK_N, 1]``."""
    PER_WORD: tl.constexpr = LAYOUT.factors_per_word
    if LAYOUT.block < LAYOUT.tile:
        BLOCKS: tl.constexpr = LAYOUT.tile // LAYOUT.block
        OWN: tl.constexpr = i * STEP // LAYOUT.block
        words = load_words(factors, tile * (BLOCKS // PER_WORD) + OWN // PER_WORD, column, n)
        shift = OWN % PER_WORD * (32 // PER_WORD)
    else:
        block = tile // (LAYOUT.block // LAYOUT.tile)
        words = load_words(factors, block // PER_WORD, column, n)
        shift = block % PER_WORD * (32 // PER_WORD)
    if LAYOUT.factor == "float16":
        return (words >> shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif LAYOUT.factor == "float32":
        return words.to(tl.float32, bitcast=True)
    else:
        # Half of the power of two.
        exponent = (words >> shift) & 0xFF
        return tl.where(exponent < 2, 0x00200000 << (exponent & 1), (exponent - 1) << 23).to(
            tl.float32, bitcast=True
        )


@triton.jit
def group_factor(
    factors,
    groups,
    tile,
    i: tl.constexpr,
    column,
    n,
    LAYOUT: tl.constexpr,
    NIBBLE: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """The factors of the group that the i-th values of a tile are in: the integer less OFFSET times the
    block's, float32 ``[BLOCK_N, 1]``.

    Args:
        NIBBLE: which nibble of a group's byte holds the integer, where that has 4 bits.
    """
    BITS: tl.constexpr = LAYOUT.group_bits
    GROUPS: tl.constexpr = LAYOUT.tile // LAYOUT.group
    OWN: tl.constexpr = i * STEP // LAYOUT.group
    PLACE: tl.constexpr = OWN % 4 * (8 // BITS) + NIBBLE
    words = load_words(groups, tile * (GROUPS // 4) + OWN // 4, column, n)
    factor = block_factor(factors, tile, i, column, n, LAYOUT)
    return tl.fma(
        code_in_mantissa(words, PLACE, BITS), factor * (1 << BITS), -factor * ((1 << BITS) + OFFSET)
    )


@triton.jit
def span_factors(weight, tile, i: tl.constexpr, column, n, LAYOUT: tl.constexpr):
    """Scale and minimum of the i-th values of a tile, float32 ``[BLOCK_N, 1]``; zero of formats without
    minima."""
    if LAYOUT.group == 0:
        scale = block_factor(weight.scales, tile, i, column, n, LAYOUT)
    else:
        scale = group_factor(
            weight.scales, weight.group_scales, tile, i, column, n, LAYOUT, 0, LAYOUT.group_offset
        )
    if not LAYOUT.minima:
        minimum = tl.zeros_like(scale)
    elif LAYOUT.group == 0:
        minimum = block_factor(weight.minimums, tile, i, column, n, LAYOUT)
    elif LAYOUT.has_group_minima:
        minimum = group_factor(weight.minimums, weight.group_minimums, tile, i, column, n, LAYOUT, 0, 0)
    else:
        minimum = group_factor(weight.minimums, weight.group_scales, tile, i, column, n, LAYOUT, 1, 0)
    return scale, minimum


@triton.jit
def add_dense_tile(sums, x, values, tile, column, row, rows, n, k, x_stride, TILE_K: tl.constexpr):
    """Adds a tile of a weight ``[n, k]`` that is not quantised."""
    k_offset = tile * TILE_K + tl.arange(0, TILE_K)
    pointers = values + column.to(tl.int64)[:, None] * k + k_offset[None, :]
    weight = tl.load(pointers, mask=(column < n)[:, None] & (k_offset < k)[None, :], other=0.0)
    activations = load_rows(x, row, rows, k_offset, k, x_stride)
    return tl.dot(weight, activations, sums, input_precision="ieee")


@triton.jit
def add_quantized_tile(sums, x, weight, tile, column, row, rows, n, k, x_stride, LAYOUT: tl.constexpr):
    """Adds a tile of a quantised weight, one value of each lane at a time. Values with one scale a row are
    exact in any of the activations' dtypes, and their scale is multiplied in at the very end."""
    STEPS: tl.constexpr = 1 << LAYOUT.bits
    VALUES: tl.constexpr = LAYOUT.values_per_lane
    low = load_plane(weight.low, tile, column, n)
    high = load_plane(weight.high, tile, column, n) if LAYOUT.high_bits else low
    for i in tl.static_range(VALUES):
        if not LAYOUT.is_row_scaled and i * STEP % LAYOUT.span == 0:
            scale, minimum = span_factors(weight, tile, i, column, n, LAYOUT)
        if LAYOUT.codes == "integer":
            mantissa = integer_value(low, high, i, LAYOUT)
            if LAYOUT.is_row_scaled:
                values = mantissa * STEPS - (STEPS + LAYOUT.offset)
            else:
                values = tl.fma(mantissa, scale * STEPS, minimum - scale * (STEPS + LAYOUT.offset))
        elif LAYOUT.codes == "iq4":
            values = iq4_value(low, i) * scale
        elif LAYOUT.codes == "e2m1":
            values = doubled_float4_value(low, i) * scale
        else:
            values = float8_value(low, i)
            if not LAYOUT.is_row_scaled:
                values *= scale
        k_offset = (tile * VALUES + i) * STEP + tl.arange(0, STEP)
        activations = load_rows(x, row, rows, k_offset, k, x_stride)
        sums = tl.dot(values.to(x.dtype.element_ty), activations, sums, input_precision="ieee")
    return sums


@triton.jit
def add_tiles(
    x,
    weight,
    first,
    last,
    column,
    row,
    rows,
    n,
    k,
    x_stride,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """The tiles ``[first, last)`` along k: float32 ``[BLOCK_N, BLOCK_ROWS]``.

    Args:
        weight: :class:`WeightTensors`.
        LAYOUT: a :class:`streamllm.ops.gpu.weight_layout.WeightLayout`; ``None`` of a weight that is not
            quantised.
    """
    sums = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    for tile in range(first, last):
        if LAYOUT is None:
            sums = add_dense_tile(sums, x, weight.low, tile, column, row, rows, n, k, x_stride, TILE_K)
        else:
            sums = add_quantized_tile(sums, x, weight, tile, column, row, rows, n, k, x_stride, LAYOUT)
    return sums


@triton.jit
def finish(sums, row_scales, bias, column, n, HAS_ROW_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """``sums * scale + bias`` for columns down the first axis; one definition, so that it rounds alike in
    every kernel."""
    inside = column < n
    added = tl.zeros_like(sums)
    if HAS_BIAS:
        added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    if HAS_ROW_SCALES:
        return tl.fma(sums, tl.load(row_scales + column, mask=inside, other=0.0)[:, None], added)
    return sums + added
