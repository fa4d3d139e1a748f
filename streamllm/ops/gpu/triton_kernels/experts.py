"""Mixtures of experts: products of rows with the weights of the experts that they use, and their sum.

**What is promised.** A row's result does not depend on the others: as in
:mod:`streamllm.ops.gpu.triton_kernels.matmul` an element is a sum over k in one order, here without splits
(there are programs enough: one for each expert in use and tile along n), and a row's experts are added in
order of their numbers. Blocks of rows grow with the number of rows, the weight's tile does not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from streamllm.ops import Experts
from streamllm.ops.gpu.expert_weights import ExpertWeights
from streamllm.ops.gpu.kernels import Tensor
from streamllm.ops.gpu.triton_kernels.elementwise import act_and_mul
from streamllm.ops.gpu.triton_kernels.expert_routing import ExpertBlocks, route
from streamllm.ops.gpu.triton_kernels.matmul import kernel_tensors
from streamllm.ops.gpu.triton_kernels.matmul_plan import (
    ROW_SCALED,
    TILES_IN_CACHE,
    ProductPlan,
    plan_product,
    product_config,
)
from streamllm.ops.gpu.triton_kernels.matmul_tiles import add_tiles, finish, tile_of
from streamllm.ops.gpu.triton_kernels.tuning import gpu_architecture
from streamllm.ops.gpu.weight_layout import LAYOUTS

SUM_COLUMNS = 1024
"""Columns of a program of :func:`sum_experts_kernel`."""


@triton.jit(do_not_specialize=["rows", "num_blocks"])
def expert_product_kernel(
    out,
    x,
    weight,
    bias,
    pairs,
    block_experts,
    rows,
    num_blocks,
    n,
    all_n,
    k,
    x_stride,
    out_stride,
    LAYOUT: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
    TILES_IN_CACHE: tl.constexpr,
):
    """Grid: tiles along n of every block. One tile ``[BLOCK_ROWS, BLOCK_N]`` of the output, whose rows are
    pairs.

    Args:
        rows: of ``x``, each with PAIRS_PER_ROW pairs.
        n, all_n: rows of an expert's weight, and of all of them: ``[all_n, k]``.
    """
    tile_n, block = tile_of(tl.program_id(0), tl.cdiv(n, BLOCK_N), num_blocks, TILES_IN_CACHE)
    expert = tl.load(block_experts + block)
    if expert < 0:
        return
    own_column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies behind an expert's last column belongs to the next one, and is not stored.
    column = expert * n + own_column
    pair = tl.load(pairs + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
    row = pair // PAIRS_PER_ROW
    sums = add_tiles(
        x, weight, 0, tl.cdiv(k, TILE_K), column, row, rows, all_n, k, x_stride,
        LAYOUT, BLOCK_N, BLOCK_ROWS, TILE_K,
    )  # fmt: skip
    result = finish(sums, weight.scales, bias, column, all_n, HAS_ROW_SCALES, HAS_BIAS)
    place = pair.to(tl.int64)[None, :] * out_stride + own_column[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=(own_column < n)[:, None] & (row < rows))


@triton.jit
def sum_experts_kernel(
    out,
    results,
    weights,
    width,
    out_stride,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows, parts of a row. The weighted sum of a row's pairs, ``results [pairs, width]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        pair = row * TOP_K + choice
        result = tl.load(results + pair * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * result
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


def experts(out: Tensor, x: Tensor, router_logits: Tensor, experts: Experts) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.experts`."""
    rows, hidden = x.shape
    if not rows:
        return
    gate_up, down = experts.gate_up, experts.down
    block_rows = min(
        _plan(weights, x, triton.cdiv(rows * experts.top_k, experts.num_experts)).block_rows
        for weights in (gate_up, down)
    )
    blocks = route(
        router_logits, experts.num_experts, experts.top_k, normalize=experts.normalize, block_rows=block_rows
    )
    num_pairs = rows * experts.top_k
    both = torch.empty(num_pairs, gate_up.n, dtype=x.dtype, device=x.device)
    multiply_by_experts(both, x, gate_up, blocks)
    active = torch.empty(num_pairs, gate_up.n // 2, dtype=x.dtype, device=x.device)
    act_and_mul(active, both, experts.gate.activation, experts.gate.limit)
    results = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    multiply_by_experts(results, active, down, blocks)
    add_results(out, results, blocks.weights)


def multiply_by_experts(out: Tensor, x: Tensor, weights: ExpertWeights, blocks: ExpertBlocks) -> None:
    """Products of rows with the experts that they use.

    Args:
        out: ``[pairs, n]``, rows contiguous.
        x: ``[rows, k]``, each with as many pairs, or a row a pair; rows contiguous.
    """
    weight = weights.rows
    plan = _plan(weights, x, blocks.block_rows)
    num_blocks = len(blocks.block_experts)
    expert_product_kernel[(triton.cdiv(weights.n, plan.block_n) * num_blocks,)](
        out,
        x,
        kernel_tensors(weight),
        weights.bias,
        blocks.pairs,
        blocks.block_experts,
        len(x),
        num_blocks,
        weights.n,
        weight.n,
        weight.k,
        x.stride(0),
        out.stride(0),
        LAYOUT=LAYOUTS.get(weight.format),
        HAS_ROW_SCALES=weight.format in ROW_SCALED,
        HAS_BIAS=weights.bias is not None,
        PAIRS_PER_ROW=len(out) // len(x),
        BLOCK_N=plan.block_n,
        BLOCK_ROWS=blocks.block_rows,
        TILE_K=plan.tile_k,
        TILES_IN_CACHE=TILES_IN_CACHE,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )


def add_results(out: Tensor, results: Tensor, weights: Tensor) -> None:
    """The weighted sum of each row's pairs: of ``results [pairs, hidden]``, contiguous, by ``weights``,
    float32 ``[rows, top_k]``."""
    rows, hidden = out.shape
    sum_experts_kernel[rows, triton.cdiv(hidden, SUM_COLUMNS)](
        out,
        results,
        weights,
        hidden,
        out.stride(0),
        TOP_K=weights.shape[1],
        BLOCK=SUM_COLUMNS,
        num_warps=4,
    )


def _plan(weights: ExpertWeights, x: Tensor, rows: int) -> ProductPlan:
    """How products of an expert with about so many rows are tiled."""
    weight, x_bytes = weights.rows, x.element_size()
    config = product_config(gpu_architecture(x.device), weight.format, x_bytes, weights.n, weight.k)
    # One program along k.
    return plan_product(replace(config, programs=1), weight.format, x_bytes, rows, weights.n, weight.k)
