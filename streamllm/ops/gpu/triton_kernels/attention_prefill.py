"""Attention of prompt chunks over the paged cache (flash attention, Dao et al. 2022).

A program owns ``BLOCK_M`` rows of one sequence and KV head: a row is a query together with one of the group's
heads, so that every key and value that is read serves them all. A chunk's own keys and values are in the
cache already; nothing distinguishes the first chunk of a prompt from the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops.gpu.kernels import AttentionShape, PagedCache, PagedContext, Tensor
from streamllm.ops.gpu.triton_kernels.attention_tiles import LOG2_E, attend
from streamllm.ops.gpu.triton_kernels.primitives import as_stored, cache_format
from streamllm.ops.gpu.triton_kernels.tuning import (
    TileConfig,
    attention_config,
    gpu_architecture,
    tile_width,
)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    out,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    sequences,
    query_start,
    context_lens,
    table_rows,
    block_tables,
    scale,
    value_scale,
    out_stride,
    q_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: tiles of the longest chunk, KV heads, sequences. The longest rows of a sequence start first."""
    sequence = tl.load(sequences + tl.program_id(2))
    kv_head = tl.program_id(1)
    first_row = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - first_row
    tile = tl.cdiv(num_queries * GROUP, BLOCK_M) - 1 - tl.program_id(0)
    if tile < 0:
        return
    context = tl.load(context_lens + sequence)
    block_table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    owned = query < num_queries
    column = tl.arange(0, BLOCK_D)
    inside = owned[:, None] & (column[None, :] < HEAD_DIM)
    row = (first_row + query).to(tl.int64)
    place = head[:, None] * HEAD_DIM + column[None, :]
    q_tile = tl.load(q + row[:, None] * q_stride + place, mask=inside, other=0.0)

    before = context - num_queries
    first_query = before + tile * BLOCK_M // GROUP
    last_query = before + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first_query - WINDOW + 1, 0)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if sinks is None:
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weights = tl.zeros([BLOCK_M], tl.float32)
    else:
        largest = tl.load(sinks + head) * LOG2_E
        weights = tl.full([BLOCK_M], 1.0, tl.float32)
    largest, weights, sums = attend(
        q_tile, before + query, largest, weights, sums, keys, values, key_scales, value_scales,
        block_table, lowest, last_query + 1, first_query, last_query, scale, kv_head,
        NUM_KV_HEADS, HEAD_DIM, HEAD_STRIDE, BLOCK_SIZE, WINDOW, SOFT_CAP, FORMAT, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    # Padding saw nothing: 0 / 1.
    weights = tl.where(weights == 0.0, 1.0, weights)
    result = sums / weights[:, None] * value_scale
    tl.store(out + row[:, None] * out_stride + place, result.to(out.dtype.element_ty), mask=inside)


def paged_prefill(
    out: Tensor,
    q: Tensor,
    cache: PagedCache,
    context: PagedContext,
    sequences: Tensor,
    max_query_len: int,
    shape: AttentionShape,
    config: TileConfig | None = None,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.paged_prefill`; ``config`` instead of the tuned tiles."""
    if not len(sequences) or not max_query_len:
        return
    architecture = gpu_architecture(q.device)
    group = shape.num_heads // shape.num_kv_heads
    config = config or attention_config("prefill", architecture, q, cache.keys, shape)
    tiles = triton.cdiv(max_query_len * group, config.block_m)
    prefill_kernel[tiles, shape.num_kv_heads, len(sequences)](
        out,
        q,
        as_stored(cache.keys),
        as_stored(cache.values),
        cache.key_scales,
        cache.value_scales,
        shape.sinks,
        sequences,
        context.query_start,
        context.context_lens,
        context.table_rows,
        context.block_tables,
        score_scale(cache, shape),
        cache.value_scale,
        out.stride(0),
        q.stride(0),
        context.block_tables.stride(0),
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        HEAD_DIM=shape.head_dim,
        HEAD_STRIDE=cache.head_stride,
        BLOCK_SIZE=cache.keys.shape[2],
        WINDOW=shape.window,
        SOFT_CAP=shape.soft_cap,
        FORMAT=cache_format(cache.keys, architecture),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=tile_width(shape.head_dim),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )


def score_scale(cache: PagedCache, shape: AttentionShape) -> float:
    """What :func:`attend` takes as ``scale``: to the soft cap's argument, or to scores in base 2."""
    factor = 1.0 / shape.soft_cap if shape.soft_cap else LOG2_E.value
    return shape.scale * cache.key_scale * factor
