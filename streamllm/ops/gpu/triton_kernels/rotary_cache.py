"""Norms over heads, rotary embedding and the write into the paged cache, in one pass over a step's rows."""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops.gpu.kernels import AttentionShape, PagedCache, Tensor
from streamllm.ops.gpu.triton_kernels.primitives import (
    FLOAT16_MAX,
    INT8,
    as_stored,
    cache_format,
    saturate,
    to_stored,
)
from streamllm.ops.gpu.triton_kernels.tuning import gpu_architecture

ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def load_part(pointers, column, inside):
    """Some columns of heads, ``[heads, columns]`` float32."""
    return tl.load(pointers + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def normed(x, factor, q_weight, k_weight, column, inside, is_q, is_v):
    """Some columns of heads times each head's factor and its norm's weight; v as it is."""
    weight = tl.where(is_q[:, None], q_weight + column[None, :], k_weight + column[None, :])
    scaled = x * factor[:, None] * tl.load(weight, mask=inside, other=0.0)
    return tl.where(is_v[:, None], x, scaled)


@triton.jit
def magnitude_bits(x):
    """Of each head the largest magnitude among some columns, as the bits of its float, which are ordered as
    floats are, NaN above all. Magnitudes saturate as float16's do."""
    return tl.max(tl.abs(saturate(x, FLOAT16_MAX)).to(tl.int32, bitcast=True), 1)


@triton.jit
def int8_scales(largest_bits):
    """The factor that makes int8 of each head, and the scale that undoes it: 0 for zeros. NaN makes the scale
    NaN, which then reaches every row that sees the position."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    is_zero = (largest != largest) | (largest < 1e-30)
    factor = tl.where(is_zero, 0.0, tl.div_rn(127.0, tl.where(is_zero, 1.0, largest)))
    return factor, tl.where(largest < 1e-30, 0.0, tl.div_rn(largest, 127.0))


@triton.jit
def store_part(
    x, qkv, keys, values, column, inside, is_q, to_keys, to_values, scaling, FORMAT: tl.constexpr
):  # fmt: skip
    """Stores some columns of heads: q in place, k and v in the cache, divided by ``scaling [heads]``, or in
    int8 multiplied by it."""
    column = column[None, :]
    tl.store(qkv + column, x.to(qkv.dtype.element_ty), mask=inside & is_q[:, None])
    if FORMAT == INT8:
        scaled = tl.where(scaling[:, None] > 0.0, saturate(x, FLOAT16_MAX) * scaling[:, None], 0.0)
    else:
        scaled = x / scaling[:, None]
    stored = to_stored(scaled, keys.dtype.element_ty, FORMAT)
    tl.store(keys + column, stored, mask=inside & to_keys[:, None])
    tl.store(values + column, stored, mask=inside & to_values[:, None])


@triton.jit
def rotary_and_cache_kernel(
    qkv,
    keys,
    values,
    key_scales,
    value_scales,
    slot_mapping,
    rope_rows,
    rope_cos,
    rope_sin,
    q_weight,
    k_weight,
    eps,
    key_scale,
    value_scale,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Grid: tokens, tiles of heads. The two halves that are rotated into each other, and the rest of a head,
    are a tile each, so that the thread that overwrites an element is the one that has read it."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    real = exists[:, None]
    slot = tl.load(slot_mapping + token) + tl.zeros([BLOCK_HEADS], tl.int64)
    to_keys = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
    to_values = is_v & exists & (slot >= 0)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    cache_head, offset = (slot // BLOCK_SIZE) * NUM_KV_HEADS + kv_head, slot % BLOCK_SIZE
    cache_row = cache_head * HEAD_STRIDE + offset * HEAD_DIM
    heads = (qkv + token * qkv_stride + head * HEAD_DIM)[:, None]
    key_rows = (keys + cache_row)[:, None]
    value_rows = (values + cache_row)[:, None]

    pair = tl.arange(0, BLOCK_HALF)
    inside = real & (pair[None, :] < HALF)
    first = load_part(heads, pair, inside)
    second = load_part(heads, HALF + pair, inside)
    rest_column = 2 * HALF + tl.arange(0, BLOCK_REST)
    rest_inside = real & (rest_column[None, :] < HEAD_DIM)
    rest = load_part(heads, rest_column, rest_inside)
    if q_weight is not None:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)
        first = normed(first, factor, q_weight, k_weight, pair, inside, is_q, is_v)
        second = normed(second, factor, q_weight, k_weight, HALF + pair, inside, is_q, is_v)
        rest = normed(rest, factor, q_weight, k_weight, rest_column, rest_inside, is_q, is_v)

    rope_row = tl.load(rope_rows + token).to(tl.int64) * HALF
    cos = tl.load(rope_cos + rope_row + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(rope_sin + rope_row + pair, mask=pair < HALF, other=0.0)[None, :]
    rotated_first = tl.where(is_v[:, None], first, first * cos - second * sin)
    rotated_second = tl.where(is_v[:, None], second, second * cos + first * sin)
    if FORMAT == INT8:
        largest = tl.maximum(magnitude_bits(rotated_first), magnitude_bits(rotated_second))
        scaling, scale = int8_scales(tl.maximum(largest, magnitude_bits(rest)))
        scale_place = cache_head * (HEAD_STRIDE // 4) + offset
        tl.store(key_scales + scale_place, scale, mask=to_keys)
        tl.store(value_scales + scale_place, scale, mask=to_values)
    else:
        scaling = tl.where(to_keys, key_scale, value_scale)
    store_part(
        rotated_first, heads, key_rows, value_rows, pair, inside, is_q, to_keys, to_values,
        scaling, FORMAT,
    )  # fmt: skip
    store_part(
        rotated_second, heads, key_rows, value_rows, HALF + pair, inside, is_q, to_keys, to_values,
        scaling, FORMAT,
    )  # fmt: skip
    if HEAD_DIM > 2 * HALF:
        store_part(
            rest, heads, key_rows, value_rows, rest_column, rest_inside, is_q, to_keys, to_values,
            scaling, FORMAT,
        )  # fmt: skip


def rotary_and_cache(
    qkv: Tensor,
    cache: PagedCache,
    slot_mapping: Tensor,
    rope_rows: Tensor,
    rope_cos: Tensor,
    rope_sin: Tensor,
    shape: AttentionShape,
    rotary_dim: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.rotary_and_cache`."""
    tokens = len(slot_mapping)
    if not tokens:
        return
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    width = triton.next_power_of_2(shape.head_dim)
    block_heads = min(max(ELEMENTS_PER_PROGRAM // width, 1), triton.next_power_of_2(num_heads))
    block_half = triton.next_power_of_2(max(rotary_dim // 2, 1))
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    rotary_and_cache_kernel[tokens, triton.cdiv(num_heads, block_heads)](
        qkv,
        as_stored(cache.keys),
        as_stored(cache.values),
        cache.key_scales,
        cache.value_scales,
        slot_mapping,
        rope_rows,
        rope_cos,
        rope_sin,
        q_weight,
        k_weight,
        eps,
        cache.key_scale,
        cache.value_scale,
        qkv.stride(0),
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        HALF=rotary_dim // 2,
        HEAD_STRIDE=cache.head_stride,
        BLOCK_SIZE=cache.keys.shape[2],
        FORMAT=cache_format(cache.keys, gpu_architecture(qkv.device)),
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(shape.head_dim - rotary_dim, 1)),
        num_warps=min(max(block_heads * block_half // 32, 1), 4),  # no element is held by two of them
        enable_fp_fusion=False,
    )
