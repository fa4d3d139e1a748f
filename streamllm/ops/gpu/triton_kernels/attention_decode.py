"""Paged decode attention where the CUDA kernel is not: the same splits and partial results, in Triton.

A program attends with the heads of one group, as rows of one tile, to one split of one context; a second
kernel combines a row's splits in their order. Programs of the first step through the list of work, whose
length they read from the device: the grid does not depend on the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops.gpu.kernels import (
    SPLIT_SIZE,
    AttentionShape,
    DecodeWork,
    PagedCache,
    PagedContext,
    Tensor,
)
from streamllm.ops.gpu.triton_kernels.attention_prefill import score_scale
from streamllm.ops.gpu.triton_kernels.attention_tiles import LOG2_E, attend
from streamllm.ops.gpu.triton_kernels.primitives import as_stored, cache_format
from streamllm.ops.gpu.triton_kernels.tuning import (
    TileConfig,
    attention_config,
    gpu_architecture,
    multiprocessors,
    tile_width,
)

PROGRAMS_PER_MULTIPROCESSOR = 8
SPLITS_AT_ONCE = 16
"""Partial results that the combining kernel holds; part of the order in which they are summed."""


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    partials,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    items,
    num_items,
    query_start,
    context_lens,
    table_rows,
    block_tables,
    scale,
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
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: any number of programs, which share out (item, KV head)."""
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    inside = (row[:, None] < GROUP) & (column[None, :] < HEAD_DIM)
    for work in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        sequence = tl.load(items + item * 2)
        split = tl.load(items + item * 2 + 1)
        context = tl.load(context_lens + sequence)
        block_table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        q_row = (tl.load(query_start + sequence + 1) - 1).to(tl.int64)
        head = kv_head * GROUP + row
        q_tile = tl.load(
            q + q_row * q_stride + head[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0.0
        )
        position = context - 1
        lowest = split * SPLIT
        if WINDOW > 0:
            lowest = tl.maximum(lowest, context - WINDOW)
        largest, weights, sums = attend(
            q_tile, tl.zeros([BLOCK_M], tl.int32) + position,
            tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32), keys, values, key_scales, value_scales,
            block_table, lowest, tl.minimum(split * SPLIT + SPLIT, context), position, position, scale,
            kv_head, NUM_KV_HEADS, HEAD_DIM, HEAD_STRIDE, BLOCK_SIZE, WINDOW, SOFT_CAP, FORMAT, BLOCK_N,
            BLOCK_D,
        )  # fmt: skip
        partial = partials + (head.to(tl.int64) + item * (NUM_KV_HEADS * GROUP)) * (HEAD_DIM + 2)
        tl.store(partial[:, None] + column[None, :], sums, mask=inside)
        tl.store(partial + HEAD_DIM, largest, mask=row < GROUP)
        tl.store(partial + HEAD_DIM + 1, weights, mask=row < GROUP)


@triton.jit
def combine_kernel(
    out,
    partials,
    sinks,
    first_item,
    num_splits,
    query_start,
    value_scale,
    out_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Grid: sequences, query heads."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_item + sequence).to(tl.int64)
    if first < 0:
        return
    column = tl.arange(0, BLOCK_D)
    if sinks is None:
        largest = float("-inf")
        weights = 0.0
    else:
        largest = tl.load(sinks + head) * LOG2_E
        weights = 1.0
    sums = tl.zeros([BLOCK_D], tl.float32)
    count = tl.load(num_splits + sequence)
    for start in range(0, count, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        partial = partials + ((first + split) * tl.num_programs(1) + head) * (HEAD_DIM + 2)
        split_largest = tl.load(partial + HEAD_DIM, mask=split < count, other=float("-inf"))
        split_weights = tl.load(partial + HEAD_DIM + 1, mask=split < count, other=0.0)
        split_sums = tl.load(
            partial[:, None] + column[None, :],
            mask=(split[:, None] < count) & (column[None, :] < HEAD_DIM),
            other=0.0,
        )
        larger = tl.maximum(largest, tl.max(split_largest, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        decay = tl.exp2(largest - base)
        factor = tl.exp2(split_largest - base)
        weights = weights * decay + tl.sum(split_weights * factor, 0)
        sums = sums * decay + tl.sum(split_sums * factor[:, None], 0)
        largest = larger
    # A context of 0 has no splits: 0 / 1.
    result = sums / tl.where(weights == 0.0, 1.0, weights) * value_scale
    row = (tl.load(query_start + sequence + 1) - 1).to(tl.int64)
    pointers = out + row * out_stride + head * HEAD_DIM + column
    tl.store(pointers, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)


def paged_decode(
    out: Tensor,
    q: Tensor,
    cache: PagedCache,
    context: PagedContext,
    work: DecodeWork,
    shape: AttentionShape,
    config: TileConfig | None = None,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.paged_decode`; ``config`` instead of the tuned tiles
    (``block_m`` follows from the group)."""
    num_sequences = len(context.context_lens)
    if not num_sequences:
        return
    architecture = gpu_architecture(q.device)
    group = shape.num_heads // shape.num_kv_heads
    config = config or attention_config("decode", architecture, q, cache.keys, shape)
    block_d = tile_width(shape.head_dim)
    most = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q.device)
    programs = min(len(work.items) * shape.num_kv_heads, most)
    if programs:
        decode_kernel[(programs,)](
            work.partials,
            q,
            as_stored(cache.keys),
            as_stored(cache.values),
            cache.key_scales,
            cache.value_scales,
            work.items,
            work.num_items,
            context.query_start,
            context.context_lens,
            context.table_rows,
            context.block_tables,
            score_scale(cache, shape),
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
            SPLIT=SPLIT_SIZE,
            BLOCK_M=max(16, triton.next_power_of_2(group)),
            BLOCK_N=config.block_n,
            BLOCK_D=block_d,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=False,
        )
    combine_kernel[num_sequences, shape.num_heads](
        out,
        work.partials,
        shape.sinks,
        work.first_item,
        work.num_splits,
        context.query_start,
        cache.value_scale,
        out.stride(0),
        HEAD_DIM=shape.head_dim,
        BLOCK_D=block_d,
        BLOCK_SPLITS=SPLITS_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=False,
    )
