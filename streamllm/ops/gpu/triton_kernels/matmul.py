"""``x @ W.T + bias`` for quantised weights, and for any where a row's bits must not depend on the batch.

**What is promised.** An output element is a sum over k in one order: tiles along k in turn, cut into splits
whose number depends on the weight's shape and format alone, the splits added in order. Few rows spread the
splits over programs and add them in a second kernel, since a step that generates is bound by reading the
weight, and a narrow weight has too few tiles to fill a GPU; many rows take them one after the other in one
program: the same sums. Tiles of rows grow with the number of rows; the weight's tile does not. The weight is
the M side of the matrix instructions, so their kind and their extent along k stay the same too, only their N
side grows (the compiled code is tested for that). That an element's sum does not depend on an instruction's N
is what hardware does, not what its makers document: ``tests/gpu`` compares the bits. Activations in float32
are multiplied in full float32, without matrix instructions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix
from streamllm.ops.gpu.triton_kernels.matmul_plan import (
    ROW_SCALED,
    ProductConfig,
    plan_product,
    product_config,
)
from streamllm.ops.gpu.triton_kernels.matmul_tiles import WeightTensors, add_tiles, finish, tile_of
from streamllm.ops.gpu.triton_kernels.tuning import gpu_architecture
from streamllm.ops.gpu.weight_rows import WeightRows

if TYPE_CHECKING:
    from torch import Tensor

SUM_COLUMNS = 256
"""Columns of a program of :func:`sum_splits_kernel`."""


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    out,
    partials,
    x,
    weight,
    bias,
    rows,
    n,
    k,
    x_stride,
    out_stride,
    LAYOUT: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
    TILES_IN_CACHE: tl.constexpr,
):
    """One tile ``[BLOCK_ROWS, BLOCK_N]`` of the output; with SPREAD, one split of it, to ``partials``.

    Args:
        partials: float32 ``[SPLITS, rows, n]``; read by :func:`sum_splits_kernel`.
        weight, LAYOUT: as in :func:`~streamllm.ops.gpu.triton_kernels.matmul_tiles.add_tiles`.
        SPREAD: whether the grid's second axis runs over the splits.
    """
    tile_n, tile_row = tile_of(
        tl.program_id(0), tl.cdiv(n, BLOCK_N), tl.cdiv(rows, BLOCK_ROWS), TILES_IN_CACHE
    )
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tiles_k = tl.cdiv(k, TILE_K)
    tiles_per_split = tl.cdiv(tiles_k, SPLITS)

    inside = (column < n)[:, None] & (row < rows)[None, :]
    if SPREAD:
        split = tl.program_id(1)
        first = split * tiles_per_split
        last = tl.minimum(first + tiles_per_split, tiles_k)
        sums = add_tiles(
            x, weight, first, last, column, row, rows, n, k, x_stride,
            LAYOUT, BLOCK_N, BLOCK_ROWS, TILE_K,
        )  # fmt: skip
        place = (tl.cast(split, tl.int64) * rows + row.to(tl.int64)[None, :]) * n + column[:, None]
        tl.store(partials + place, sums, mask=inside)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_ROWS), tl.float32)
        for split in range(SPLITS):
            first = split * tiles_per_split
            last = tl.minimum(first + tiles_per_split, tiles_k)
            total += add_tiles(
                x, weight, first, last, column, row, rows, n, k, x_stride,
                LAYOUT, BLOCK_N, BLOCK_ROWS, TILE_K,
            )  # fmt: skip
        result = finish(total, weight.scales, bias, column, n, HAS_ROW_SCALES, HAS_BIAS)
        place = row.to(tl.int64)[None, :] * out_stride + column[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_splits_kernel(
    out,
    partials,
    scales,
    bias,
    rows,
    n,
    out_stride,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the splits of one row in order, and finishes it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < n
    total = tl.zeros((BLOCK_N, 1), tl.float32)
    for split in range(SPLITS):
        place = (tl.cast(split, tl.int64) * rows + row) * n + column
        total += tl.load(partials + place, mask=inside, other=0.0)[:, None]
    result = finish(total, scales, bias, column, n, HAS_ROW_SCALES, HAS_BIAS)
    tl.store(out + row * out_stride + column[:, None], result.to(out.dtype.element_ty), mask=inside[:, None])


def quantized_linear(out: Tensor, x: Tensor, weight: QuantizedMatrix) -> None:
    """``out = x @ W.T + bias``.

    Args:
        out: ``[rows, n]``, a row's elements side by side; float32, or ``x``'s dtype.
        x: ``[rows, k]``, a row's elements side by side: float32, float16 or bfloat16. Weights with a scale
            for each group are rounded to that dtype.
        weight: on the same device.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    _check(out, x, weight.shape)
    first = 0
    for piece in weight.pieces:
        columns = slice(first, first + piece.n)
        multiply_rows(out[:, columns], x, piece, None if weight.bias is None else weight.bias[columns])
        first += piece.n


def batch_invariant_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """``out = x @ weight.T + bias`` with each row's bits independent of the others and of their number.

    Args:
        out, x: as for :func:`quantized_linear`.
        weight: ``[n, k]`` of ``x``'s dtype, contiguous.
        bias: ``[n]``, or ``None``.
    """
    rows = WeightRows("dense", len(weight), weight.shape[1], weight)
    _check(out, x, (rows.n, rows.k))
    multiply_rows(out, x, rows, bias)


def multiply_rows(
    out: Tensor, x: Tensor, weight: WeightRows, bias: Tensor | None, config: ProductConfig | None = None
) -> None:
    """The product with rows in one format, launched as ``config`` says, or else the tables."""
    rows, n, k = len(x), weight.n, weight.k
    if rows == 0:
        return
    if config is None:
        config = product_config(gpu_architecture(x.device), weight.format, x.element_size(), n, k)
    plan = plan_product(config, weight.format, x.element_size(), rows, n, k)
    tensors, row_scaled = kernel_tensors(weight), weight.format in ROW_SCALED
    partials = None
    if plan.spread:
        partials = torch.empty(plan.splits, rows, n, dtype=torch.float32, device=x.device)
    product_kernel[plan.grid](
        out,
        partials,
        x,
        tensors,
        bias,
        rows,
        n,
        k,
        x.stride(0),
        out.stride(0),
        **plan.constants(weight.format, bias is not None),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if plan.spread:
        sum_splits_kernel[(rows, triton.cdiv(n, SUM_COLUMNS))](
            out,
            partials,
            weight.scales if row_scaled else None,
            bias,
            rows,
            n,
            out.stride(0),
            HAS_ROW_SCALES=row_scaled,
            HAS_BIAS=bias is not None,
            SPLITS=plan.splits,
            BLOCK_N=SUM_COLUMNS,
        )


def kernel_tensors(weight: WeightRows) -> WeightTensors:
    """The weight's tensors as kernels take them."""
    if weight.scales is None or weight.format in ROW_SCALED:
        return WeightTensors(weight.values, None, weight.scales, None, None, None)
    factors = (weight.scales, weight.minimums, weight.group_scales, weight.group_minimums)
    words = (None if factor is None else factor.view(torch.int32) for factor in factors)
    return WeightTensors(weight.values, weight.high_bits, *words)


def _check(out: Tensor, x: Tensor, shape: tuple[int, int]) -> None:
    n, k = shape
    if x.shape[1] != k or out.shape != (len(x), n):
        raise ValueError(f"{list(x.shape)} by a weight [{n}, {k}] does not give {list(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row must lie side by side")
