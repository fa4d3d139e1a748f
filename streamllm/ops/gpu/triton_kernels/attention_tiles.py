"""The part that prefill and decode share: a tile of query rows attends to a range of positions.

The running softmax (Dao et al. 2022) of every row is its largest score, the sum of weights and the weighted
sum of values, all float32. Keys come in tiles of ``BLOCK_N`` that begin at multiples of ``BLOCK_N``, and a
tile in which a row sees nothing leaves its state as it was, bit for bit. So a row's result depends neither on
the rows that share its tile nor on how the prompt was cut. That needs the masked loop and the unmasked one to
round alike: the one product that could be contracted with a sum is an explicit ``fma``, and callers switch
contraction off (``enable_fp_fusion=False``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops.gpu.triton_kernels.primitives import INT8, from_stored, tanh

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(pointers, readable, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``[*, BLOCK_D]`` from row pointers; what is not readable or beyond the head is 0."""
    column = tl.arange(0, BLOCK_D)
    pointers = pointers[:, None] + column[None, :]
    if MASKED and HEAD_DIM != BLOCK_D:
        return tl.load(pointers, mask=readable[:, None] & (column[None, :] < HEAD_DIM), other=0)
    elif MASKED:
        return tl.load(pointers, mask=readable[:, None], other=0)
    elif HEAD_DIM != BLOCK_D:
        return tl.load(pointers, mask=column[None, :] < HEAD_DIM, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_scales(pointers, readable, MASKED: tl.constexpr):
    """``[*]`` from pointers; 0 where nothing is readable."""
    if MASKED:
        return tl.load(pointers, mask=readable, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def attend_tiles(
    q,
    row_position,
    largest,
    weights,
    sums,
    keys,
    values,
    key_scales,
    value_scales,
    block_table,
    first,
    last,
    lowest,
    highest,
    scale,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes the key tiles that begin in ``[first, last)`` into the state of the rows of ``q``.

    Args:
        q: ``[rows, BLOCK_D]`` in the activations' dtype.
        row_position: int32 ``[rows]``, where each row stands in its sequence.
        largest, weights: float32 ``[rows]``; ``sums``: float32 ``[rows, BLOCK_D]``.
        key_scales, value_scales: of an int8 cache; a key's is a factor of its products, a value is multiplied
            before it is rounded to the activations' dtype.
        lowest, highest: the positions ``[lowest, highest)`` may be read, no others (``MASKED``).
        scale: of the products, base-2 logarithm's factor included unless there is a soft cap.
        HEAD_STRIDE: elements from a block's head to the next one.
        MASKED: false where every row sees every position of every tile.
    """
    for start in range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        readable = (position >= lowest) & (position < highest)
        if MASKED:
            block = tl.load(block_table + position // BLOCK_SIZE, mask=readable, other=-1)
            readable = readable & (block >= 0)
        else:
            block = tl.load(block_table + position // BLOCK_SIZE)
        head, offset = block.to(tl.int64) * NUM_KV_HEADS + kv_head, position % BLOCK_SIZE
        if FORMAT == INT8:
            row = head * HEAD_STRIDE + offset * HEAD_DIM
        else:
            # The same: without scales between heads one product is enough, and saves a register.
            row = (head * BLOCK_SIZE + offset) * HEAD_DIM
        key = from_stored(load_rows(keys + row, readable, HEAD_DIM, BLOCK_D, MASKED), q.dtype, FORMAT)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if FORMAT == INT8:
            scale_place = head * (HEAD_STRIDE // 4) + offset
            scores *= load_scales(key_scales + scale_place, readable, MASKED)[None, :]
        if SOFT_CAP > 0.0:
            scores = tanh(scores * scale) * (SOFT_CAP * LOG2_E)
        if MASKED:
            seen = readable[None, :] & (position[None, :] <= row_position[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > row_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        factor = 1.0 if SOFT_CAP > 0.0 else scale
        larger = tl.maximum(largest, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet has -inf, and -inf - -inf would be NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        decay = tl.exp2(largest - base)
        weight = tl.exp2(tl.fma(scores, tl.full(scores.shape, factor, tl.float32), -base[:, None]))
        weights = tl.fma(weights, decay, tl.sum(weight, 1))
        value = from_stored(load_rows(values + row, readable, HEAD_DIM, BLOCK_D, MASKED), q.dtype, FORMAT)
        if FORMAT == INT8:
            value_scale = load_scales(value_scales + scale_place, readable, MASKED)
            value = (value.to(tl.float32) * value_scale[:, None]).to(q.dtype)
        sums = tl.dot(weight.to(q.dtype), value, sums * decay[:, None], input_precision="ieee")
        largest = larger
    return largest, weights, sums


@triton.jit
def attend(
    q,
    row_position,
    largest,
    weights,
    sums,
    keys,
    values,
    key_scales,
    value_scales,
    block_table,
    lowest,
    highest,
    first_query,
    last_query,
    scale,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """As :func:`attend_tiles`, over the positions ``[lowest, highest)``: tiles at the window's edge, tiles
    that every row sees whole, tiles at the causal edge.

    Args:
        lowest: a multiple of ``BLOCK_N`` unless there is a window.
        first_query, last_query: the smallest and the largest of ``row_position``.
    """
    begin = lowest // BLOCK_N * BLOCK_N
    whole = begin
    if WINDOW > 0:
        edge = tl.maximum(last_query - WINDOW + 1, lowest)
        whole = tl.minimum(tl.cdiv(edge, BLOCK_N), tl.cdiv(highest, BLOCK_N)) * BLOCK_N
    whole_end = tl.maximum(tl.minimum(first_query + 1, highest) // BLOCK_N * BLOCK_N, whole)
    if WINDOW > 0:
        largest, weights, sums = attend_tiles(
            q, row_position, largest, weights, sums, keys, values, key_scales, value_scales,
            block_table, begin, whole,
            lowest, highest, scale, kv_head, NUM_KV_HEADS, HEAD_DIM, HEAD_STRIDE, BLOCK_SIZE, WINDOW,
            SOFT_CAP, FORMAT, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
    largest, weights, sums = attend_tiles(
        q, row_position, largest, weights, sums, keys, values, key_scales, value_scales,
        block_table, whole, whole_end,
        lowest, highest, scale, kv_head, NUM_KV_HEADS, HEAD_DIM, HEAD_STRIDE, BLOCK_SIZE, WINDOW, SOFT_CAP,
        FORMAT, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    largest, weights, sums = attend_tiles(
        q, row_position, largest, weights, sums, keys, values, key_scales, value_scales,
        block_table, whole_end, highest,
        lowest, highest, scale, kv_head, NUM_KV_HEADS, HEAD_DIM, HEAD_STRIDE, BLOCK_SIZE, WINDOW, SOFT_CAP,
        FORMAT, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip
    return largest, weights, sums
