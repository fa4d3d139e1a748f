"""Searching a row of float32 values without sorting it: device functions of the sampling kernel.

Everything that is summed is an integer: counts, or weights as multiples of 2^-44. So sums have no rounding
and no order.

Elements are compared by *keys*, a value and its place in the row in one int64: of two elements the one with
the larger value has the larger key, of equal values the one with the lower id.
"""

from __future__ import annotations

import triton
import triton.language as tl

ID_BITS = tl.constexpr(19)
ID_MASK = tl.constexpr((1 << 19) - 1)
MAX_VOCAB_SIZE = 1 << 19

BUCKET_BITS = tl.constexpr(2)
BUCKETS = tl.constexpr(4)
"""Parts that a pass of a search cuts its range of keys into."""

UNIT = tl.constexpr(2.0**44)


@triton.jit
def ordered(value):
    """float32 as int64 in the same order: -inf, ..., zeros (both alike), ..., +inf, NaN."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    number = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, number).to(tl.int64)


@triton.jit
def least_key(value):
    """That of an element with this value and the highest id."""
    return ordered(value) << ID_BITS


@triton.jit
def key_of(value, ids):
    return least_key(value) + (ids ^ ID_MASK).to(tl.int64)


@triton.jit
def value_of(key):
    number = (key >> ID_BITS).to(tl.int32)
    return tl.where(number < 0, number ^ 0x7FFFFFFF, number).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    return ((key & ID_MASK) ^ ID_MASK).to(tl.int32)


@triton.jit
def units(weight):
    """A weight of [0, 1] as a multiple of 2^-44, rounded down."""
    return (weight * UNIT).to(tl.int64)


@triton.jit
def precise_exp(x):
    """exp(x) for x <= 0; 0 for NaN. ``tl.exp`` rounds ``x * log2(e)`` before it takes the power, which costs
    as many bits as that number has before its point."""
    x = tl.where(x > -150.0, x, -150.0)
    whole = x * 1.44269502162933349609375
    rest = tl.fma(x, 1.44269502162933349609375, -whole) + x * 1.92596299112661746887e-8
    return tl.exp2(whole) * (1.0 + rest * 0.693147180559945309)


@triton.jit
def as_floats(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def random24(seed, choice, position):
    """The row's random number of [0, 2^24): the first word of Philox4x32-10 without its lowest 8 bits."""
    c0, c1 = position.to(tl.uint32), choice.to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return (c0 >> 8).to(tl.int64)


@triton.jit
def largest_key(values, count, BLOCK: tl.constexpr):
    largest = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(values + ids, mask=ids < count, other=float("-inf"))
        largest = tl.maximum(largest, tl.where(ids < count, key_of(value, ids), largest))
    return tl.max(largest, 0)


@triton.jit
def find_last(values, count, low, high, target, last_shift, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at which the measure of all keys from it on, their number or (``MASS``) the sum of
    their weights, reaches ``target``; or a smaller key with no other element's between them.

    Args:
        low, high: all keys are below ``high``, and those from ``low`` on reach the target.
        last_shift: 0, or :data:`ID_BITS` to find, with multiples of ``1 << ID_BITS`` for bounds, the least
            key of the value that the found key has.

    Returns:
        the key, and the measure of all keys from it on.
    """
    bucket = tl.arange(0, BUCKETS)
    width = high - low
    shift = last_shift
    while ((width - 1) >> shift) >= BUCKETS:
        shift += 1
    above = target * 0  # the measure of what is beyond the range
    reached = above
    searching = True
    while searching:
        # Of the keys of the range that are in a bucket or a higher one.
        sums = tl.zeros([BUCKETS, BLOCK], tl.int64)
        numbers = tl.zeros([BUCKETS, BLOCK], tl.int32)
        for start in range(0, count, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = tl.load(values + ids, mask=ids < count, other=float("-inf"))
            offset = key_of(value, ids) - low
            inside = (ids < count) & (offset >= 0) & (offset < width)
            chosen = inside[None, :] & ((offset >> shift)[None, :] >= bucket[:, None])
            numbers += chosen.to(tl.int32)
            if MASS:
                sums += tl.where(chosen, units(value)[None, :], 0)
        of_bucket = tl.sum(numbers, 1)
        measure = above + tl.sum(sums, 1) if MASS else above + of_bucket
        found = tl.maximum(tl.sum((measure >= target).to(tl.int32), 0) - 1, 0)
        reached = tl.sum(tl.where(bucket == found, measure, 0), 0)
        number = tl.sum(
            tl.where(bucket == found, of_bucket, 0) - tl.where(bucket == found + 1, of_bucket, 0), 0
        )
        above = tl.maximum(above, tl.sum(tl.where(bucket == found + 1, measure, 0), 0))
        low += found.to(tl.int64) << shift
        width = tl.full([], 1, tl.int64) << shift
        searching = (number > 1) & (shift > last_shift)
        shift = tl.maximum(shift - BUCKET_BITS, last_shift)
    return low, reached


@triton.jit
def mass_from(cutoff, weights, count, BLOCK: tl.constexpr):
    """The sum of the weights with keys >= cutoff."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < count, other=0.0)
        total += tl.where(key_of(weight, ids) >= cutoff, units(weight), 0)
    return tl.sum(total, 0)


@triton.jit
def find_in_id_order(cutoff, weights, count, target, BLOCK: tl.constexpr):
    """The lowest id at which the sum of the weights with keys >= cutoff, in id order, exceeds ``target``;
    there must be one."""
    before = target * 0
    begin = 0
    searching = True
    while searching:
        ids = begin + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < count, other=0.0)
        total = tl.sum(tl.where(key_of(weight, ids) >= cutoff, units(weight), 0), 0)
        searching = (before + total <= target) & (begin + BLOCK < count)
        begin = tl.where(searching, begin + BLOCK, begin)
        before = tl.where(searching, before + total, before)
    ids = begin + tl.arange(0, BLOCK)
    weight = tl.load(weights + ids, mask=ids < count, other=0.0)
    sums = before + tl.cumsum(tl.where(key_of(weight, ids) >= cutoff, units(weight), 0), 0)
    return begin + tl.sum((sums <= target).to(tl.int32), 0)
