"""What the matrix product kernels are made of: a tile of the weight times a tile of the activations.

A weight tile ``[BLOCK_N, K]`` stands on the left and the activations' rows are columns of the right operand,
so that the matrix units see the weight as their M side whatever the number of rows. How quantised weights lie
in memory is told in :mod:`streamllm.ops.gpu.quantized_matrix`.

Few rows are bound by reading the weight, if no more than a few instructions go into making a float of each
stored value. So a code is put into the mantissa of 1.0, which takes a shift and one logical operation, and
one multiply-add makes the weight of it. That is as exact as a conversion: scales have 11 bits and codes 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(16)
"""32-bit words of one row in a tile of a quantised weight: one value of each word makes up the extent along k
of one matrix instruction."""


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
def load_factor_pairs(factors, pair, column, n):
    """Factors of two groups that follow each other, int32 ``[BLOCK_N]``; zeros beyond the last column. (Four
    bytes are the least that an asynchronous copy moves.)"""
    return tl.load(factors + tl.cast(pair, tl.int64) * n + column, mask=column < n, other=0)


@triton.jit
def factor_of(pairs, half):
    """The factors of one of the two groups, float32 ``[BLOCK_N, 1]``."""
    return (pairs >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def code_in_mantissa(words, i: tl.constexpr, BITS: tl.constexpr):
    """``1 + code / 2^BITS`` of the i-th unsigned code of each word."""
    RIGHT: tl.constexpr = i * BITS - (23 - BITS)
    moved = words >> RIGHT if RIGHT > 0 else words << -RIGHT
    MASK: tl.constexpr = (1 << 23) - (1 << (23 - BITS))
    return ((moved & MASK) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def float8_value(words, i: tl.constexpr):
    """The i-th e4m3 value of each word, in float32: sign, exponent and mantissa moved to their place, which
    makes it 2^120 times too small. NaN is not among them."""
    moved = words << (24 - 8 * i)
    bits = (moved & -0x80000000) | ((moved >> 4) & 0x07F00000)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def add_dense_tile(sums, x, values, tile, column, row, rows, n, k, x_stride, TILE_K: tl.constexpr):
    """Adds a tile of a weight ``[n, k]`` that is not quantised."""
    k_offset = tile * TILE_K + tl.arange(0, TILE_K)
    pointers = values + column.to(tl.int64)[:, None] * k + k_offset[None, :]
    weight = tl.load(pointers, mask=(column < n)[:, None] & (k_offset < k)[None, :], other=0.0)
    activations = load_rows(x, row, rows, k_offset, k, x_stride)
    return tl.dot(weight, activations, sums, input_precision="ieee")


@triton.jit
def add_quantized_tile(
    sums,
    x,
    values,
    scales,
    minimums,
    tile,
    column,
    row,
    rows,
    n,
    k,
    x_stride,
    FORMAT: tl.constexpr,
):
    """Adds a tile of a quantised weight, one value of each word at a time. Values with one scale a row are
    exact in any of the activations' dtypes, and their scale is multiplied in at the very end."""
    BITS: tl.constexpr = 4 if FORMAT == "q4_0" or FORMAT == "q4_1" else 8
    PER_WORD: tl.constexpr = 32 // BITS
    STEPS: tl.constexpr = 1 << BITS
    pointers = (
        values + tl.cast(tile, tl.int64) * n * WORDS + column[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    )
    words = tl.load(pointers, mask=(column < n)[:, None], other=0)
    for i in tl.static_range(PER_WORD):
        if FORMAT == "float8_e4m3":
            weight = float8_value(words, i)
        elif FORMAT == "int8":
            weight = code_in_mantissa(words, i, BITS) * STEPS - 1.5 * STEPS
        else:
            if i % 4 == 0:
                pair = tile * (PER_WORD // 4) + i // 4
                scale_pairs = load_factor_pairs(scales, pair, column, n)
                if FORMAT == "q4_1":
                    minimum_pairs = load_factor_pairs(minimums, pair, column, n)
            scale = factor_of(scale_pairs, i // 2 % 2) * STEPS
            offset = factor_of(minimum_pairs, i // 2 % 2) - scale if FORMAT == "q4_1" else -1.5 * scale
            weight = tl.fma(code_in_mantissa(words, i, BITS), scale, offset)
        k_offset = (tile * PER_WORD + i) * WORDS + tl.arange(0, WORDS)
        activations = load_rows(x, row, rows, k_offset, k, x_stride)
        sums = tl.dot(weight.to(x.dtype.element_ty), activations, sums, input_precision="ieee")
    return sums


@triton.jit
def add_tiles(
    x,
    values,
    scales,
    minimums,
    first,
    last,
    column,
    row,
    rows,
    n,
    k,
    x_stride,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """The tiles ``[first, last)`` along k: float32 ``[BLOCK_N, BLOCK_ROWS]``."""
    sums = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
    for tile in range(first, last):
        if FORMAT == "dense":
            sums = add_dense_tile(sums, x, values, tile, column, row, rows, n, k, x_stride, TILE_K)
        else:
            sums = add_quantized_tile(
                sums, x, values, scales, minimums, tile, column, row, rows, n, k, x_stride, FORMAT
            )
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
