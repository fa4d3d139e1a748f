"""Replacement, masks, bias, penalties and bans of one row of logits (steps 1 to 4 of
:mod:`streamllm.runner.sampler`): device functions of the sampling kernel.

They need a compilation without fused multiply-adds, which would round otherwise than the definition.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops.gpu.triton_kernels.sampling_search import as_floats, largest_key

LARGEST_LOGIT = tl.constexpr(1e30)
"""Penalties never make a finite logit infinite, nor any temperature what they leave."""


@triton.jit
def finite(value):
    """NaN stays NaN."""
    value = tl.where(value > LARGEST_LOGIT, LARGEST_LOGIT, value)
    return tl.where(value < -LARGEST_LOGIT, -LARGEST_LOGIT, value)


@triton.jit
def apply_edits(edits, logits, vocab_size, BLOCK: tl.constexpr):
    """Bias, penalties and bans of the ``ROW_EDITS`` (:mod:`streamllm.ops.step_inputs`) at an address. Ids
    outside the vocabulary have no effect."""
    words = edits.to(tl.pointer_type(tl.int64))
    bias_ids = tl.load(words).to(tl.pointer_type(tl.int32))
    bias_values = as_floats(tl.load(words + 1))
    seen_ids = tl.load(words + 2).to(tl.pointer_type(tl.int32))
    output_counts = tl.load(words + 3).to(tl.pointer_type(tl.int32))
    banned_ids = tl.load(words + 4).to(tl.pointer_type(tl.int32))
    penalties = as_floats(edits + 64)
    repetition, frequency = tl.load(penalties), tl.load(penalties + 1)
    presence = tl.load(penalties + 2)
    num_biases, num_seen, num_banned = tl.load(words + 5), tl.load(words + 6), tl.load(words + 7)

    for start in range(0, num_biases, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids + i, mask=i < num_biases, other=-1)
        known = (ids >= 0) & (ids < vocab_size)
        logit = tl.load(logits + ids, mask=known, other=0.0)
        tl.store(logits + ids, logit + tl.load(bias_values + i, mask=known, other=0.0), mask=known)
    tl.debug_barrier()
    for start in range(0, num_seen, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ids = tl.load(seen_ids + i, mask=i < num_seen, other=-1)
        known = (ids >= 0) & (ids < vocab_size)
        logit = tl.load(logits + ids, mask=known, other=float("-inf"))
        known &= logit != float("-inf")
        divided = tl.div_rn(logit, tl.zeros([BLOCK], tl.float32) + repetition)
        x = finite(tl.where(logit > 0.0, divided, logit * repetition))
        output_count = tl.load(output_counts + i, mask=known, other=0)
        less = x - frequency * output_count.to(tl.float32) - presence
        tl.store(logits + ids, finite(tl.where(output_count > 0, less, x)), mask=known)
    tl.debug_barrier()
    for start in range(0, num_banned, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ids = tl.load(banned_ids + i, mask=i < num_banned, other=-1)
        lowest = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(logits + ids, lowest, mask=(ids >= 0) & (ids < vocab_size))
    tl.debug_barrier()


@triton.jit
def masked_copy(logits, first_mask, second_mask, vocab_size, copy, BLOCK: tl.constexpr):
    """The logits, -inf where a mask (an address; 0 allows everything) has a 0 in bit id % 32 of word
    id / 32."""
    first, second = first_mask.to(tl.pointer_type(tl.uint32)), second_mask.to(tl.pointer_type(tl.uint32))
    in_first, in_second = (first_mask != 0) * vocab_size, (second_mask != 0) * vocab_size
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        allowed = tl.load(first + ids // 32, mask=ids < in_first, other=0xFFFFFFFF)
        allowed &= tl.load(second + ids // 32, mask=ids < in_second, other=0xFFFFFFFF)
        allowed = (allowed >> (ids % 32).to(tl.uint32)) & 1
        logit = tl.load(logits + ids, mask=inside, other=0.0)
        tl.store(copy + ids, tl.where(allowed != 0, logit, float("-inf")), mask=inside)
    tl.debug_barrier()


@triton.jit
def process(
    raw, raw_largest, replacement, first_mask, second_mask, edits, vocab_size, processed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Replacement, masks, bias, penalties and bans. Returns the address of the result, which is the row as it
    came unless something changes it, and its largest key."""
    source = tl.where(replacement != 0, replacement, raw.to(tl.int64))
    largest = raw_largest
    if (first_mask | second_mask | edits) != 0:
        masked_copy(as_floats(source), first_mask, second_mask, vocab_size, processed, BLOCK)
        source = processed.to(tl.int64)
        if edits != 0:
            apply_edits(edits, processed, vocab_size, BLOCK)
    if source != raw.to(tl.int64):
        largest = largest_key(as_floats(source), vocab_size, BLOCK)
    return source, largest
