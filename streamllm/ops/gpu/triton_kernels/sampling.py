"""A token from each row of logits, as :mod:`streamllm.runner.sampler` defines it; a program a row.

Sums are of integers (:mod:`streamllm.ops.gpu.triton_kernels.sampling_search`). Results are the definition's
except where the row's random number, or the edge of top-k, top-p or min-p, lies within the rounding of exp()
(a few units in the last place) or of a weight to a multiple of 2^-44.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops.gpu.kernels import DeviceSampling, Tensor
from streamllm.ops.gpu.triton_kernels.sampling_rules import process
from streamllm.ops.gpu.triton_kernels.sampling_search import (
    ID_BITS,
    ID_MASK,
    MAX_VOCAB_SIZE,
    UNIT,
    as_floats,
    find_in_id_order,
    find_last,
    id_of,
    key_of,
    largest_key,
    least_key,
    mass_from,
    precise_exp,
    random24,
    units,
    value_of,
)

BLOCK, NUM_WARPS = 2048, 16

MAX_PROGRAMS = 264
"""Rows beyond this wait for earlier ones: it bounds the scratch memory."""

SMALLEST_WEIGHT = tl.constexpr(2.0**-126)
GREEDY_TEMPERATURE = tl.constexpr(1e-5)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
NOT_FINITE = tl.constexpr(-1)
NOTHING_ALLOWED = tl.constexpr(-2)


@triton.jit
def write_weights(logits, maximum, temperature, floor, weights, count, BLOCK: tl.constexpr):
    """Probabilities times a constant, 0 for those below ``floor``; returns their sum in units, and how many
    are not 0."""
    total = tl.zeros([BLOCK], tl.int64)
    number = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + ids, mask=ids < count, other=float("-inf"))
        divisor = tl.zeros([BLOCK], tl.float32) + temperature
        weight = precise_exp(tl.div_rn(logit - maximum, divisor))
        weight = tl.where(weight >= floor, weight, 0.0)
        tl.store(weights + ids, weight, mask=ids < count)
        total += units(weight)
        number += (weight > 0.0).to(tl.int32)
    tl.debug_barrier()
    return tl.sum(total, 0), tl.sum(number, 0)


@triton.jit
def draw(logits, maximum, temperature, top_k, top_p, min_p, random, weights, count, BLOCK: tl.constexpr):
    """Temperature, min-p, top-k, top-p and the draw.

    Returns:
        the token, or NOT_FINITE if the temperature is NaN, and the least key that a weight must have for its
        token to be drawn.
    """
    min_p = tl.where(min_p > 0.0, tl.minimum(min_p, 1.0), 0.0)
    floor = tl.maximum(min_p, SMALLEST_WEIGHT)
    total, number = write_weights(logits, maximum, temperature, floor, weights, count, BLOCK)
    token = NOT_FINITE
    cutoff = least_key(0.0)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        cutoff = least_key(floor)
    end = least_key(1.0) + ID_MASK + 1
    if total > 0:
        if (top_k > 0) & (top_k < number):
            wanted = top_k.to(tl.int64)
            cutoff, _ = find_last(weights, count, cutoff, end, wanted, ID_BITS, False, BLOCK)
            total = mass_from(cutoff, weights, count, BLOCK)
        if top_p < 1.0:
            share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            share = tl.minimum(tl.maximum(share, 1), total)
            # All weights of fewer units than this are less, together, than what top-p leaves out. Twice a
            # little smaller: for what units() rounds off, and for its own rounding.
            least = tl.maximum((total - share) // count - 1, 0)
            bound = least.to(tl.float32) * (1.0 / UNIT) * 0.999999
            low = tl.maximum(cutoff, least_key(bound))
            cutoff, total = find_last(weights, count, low, end, share, 0, True, BLOCK)
        # floor(total * random / 2^24)
        target = (total >> 24) * random + (((total & 0xFFFFFF) * random) >> 24)
        token = find_in_id_order(cutoff, weights, count, target, BLOCK)
    return token, cutoff


@triton.jit
def keep(logits, weights, cutoff, temperature, count, kept, BLOCK: tl.constexpr):
    """Logits over the temperature, -inf where the weight's key is below the cutoff."""
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + ids, mask=ids < count, other=0.0)
        weight = tl.load(weights + ids, mask=ids < count, other=0.0)
        scaled = tl.div_rn(logit, tl.zeros([BLOCK], tl.float32) + temperature)
        value = tl.where(key_of(weight, ids) >= cutoff, scaled, float("-inf"))
        tl.store(kept + ids, value, mask=ids < count)
    tl.debug_barrier()


@triton.jit
def as_reported(value, shift, log_sum):
    """In two steps, so that a large maximum does not swallow the sum."""
    return ((value.to(tl.float64) - shift) - log_sum).to(tl.float32)


@triton.jit
def report(
    values, maximum, normalised, token, wanted, list_, logprob, rank, top_ids, top_logprobs, count,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes logprob and rank of ``token``, and the ``wanted`` likeliest tokens, of values of which the
    largest is ``maximum``; ``list_`` is scratch, int64 ``[TOP]``."""
    sampled = tl.load(values + token)
    total = tl.zeros([BLOCK], tl.int64)
    greater = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = tl.load(values + ids, mask=ids < count, other=float("-inf"))
        total += units(precise_exp(value - maximum))
        greater += (value > sampled).to(tl.int32)
    log_sum = tl.log(tl.sum(total, 0).to(tl.float64) * (1.0 / UNIT))
    log_sum = tl.where(normalised, log_sum, 0.0)
    shift = tl.where(normalised, maximum, 0.0).to(tl.float64)
    tl.store(logprob, as_reported(sampled, shift, log_sum))
    tl.store(rank, 1 + tl.sum(greater, 0))
    if wanted > 0:
        found = tl.minimum(wanted, count)
        lowest, highest = least_key(float("-inf")), least_key(float("inf"))
        cutoff, _ = find_last(values, count, lowest, highest, found.to(tl.int64), 0, False, BLOCK)
        place = 0
        for start in range(0, count, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = tl.load(values + ids, mask=ids < count, other=float("-inf"))
            key = key_of(value, ids)
            chosen = (ids < count) & (key >= cutoff)
            places = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(list_ + places, key, mask=chosen)
            place += tl.sum(chosen.to(tl.int32), 0)
        tl.debug_barrier()
        i = tl.arange(0, TOP)
        key = tl.load(list_ + i, mask=i < found, other=lowest - 1 - i)
        places = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
        # More may be asked for than the vocabulary holds.
        tl.store(top_ids + places, tl.where(i < found, id_of(key), -1), mask=i < wanted)
        value = as_reported(value_of(key), shift, log_sum)
        tl.store(top_logprobs + places, tl.where(i < found, value, float("-inf")), mask=i < wanted)


@triton.jit
def sample_kernel(
    logits, scratch, lists, temperatures, top_ks, top_ps, min_ps, seeds, choices, positions, num_logprobs,
    logprobs_modes, edits, allowed_masks, grammar_masks, replacements, targets, tokens, logprobs, ranks,
    top_ids, top_logprobs, logits_stride, num_outputs, vocab_size, max_logprobs,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: as many programs as ``scratch`` ``[programs, 2, vocab_size]`` and ``lists`` have rows."""
    program = tl.program_id(0).to(tl.int64)
    processed = scratch + program * 2 * vocab_size
    weights = processed + vocab_size
    for row in range(tl.program_id(0), num_outputs, tl.num_programs(0)):
        target = tl.load(targets + row)
        if target >= -1:
            raw = logits + tl.cast(row, tl.int64) * logits_stride
            raw_largest = largest_key(raw, vocab_size, BLOCK)
            token = target
            values = raw.to(tl.int64)
            maximum = value_of(raw_largest)
            normalised = True
            wanted = tl.load(num_logprobs + row)
            reporting = True
            if (raw_largest < least_key(-LARGEST_FLOAT)) | (raw_largest >= least_key(float("inf"))):
                token = NOT_FINITE
                reporting = False
            elif target < 0:
                mode = tl.load(logprobs_modes + row)
                source, largest = process(
                    raw, raw_largest, tl.load(replacements + row), tl.load(allowed_masks + row),
                    tl.load(grammar_masks + row), tl.load(edits + row), vocab_size, processed, BLOCK
                )  # fmt: skip
                reporting = wanted >= 0
                normalised = mode < 2
                temperature = tl.load(temperatures + row)
                peak = value_of(largest)
                if (largest < least_key(-LARGEST_FLOAT)) | (largest >= least_key(float("inf"))):
                    token = tl.where(peak == float("-inf"), NOTHING_ALLOWED, NOT_FINITE)
                elif temperature < GREEDY_TEMPERATURE:
                    token = id_of(largest)
                    if mode % 2 == 1:
                        values = source
                        maximum = peak
                else:
                    random = random24(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
                    token, cutoff = draw(
                        as_floats(source), peak, temperature, tl.load(top_ks + row), tl.load(top_ps + row),
                        tl.load(min_ps + row), random, weights, vocab_size, BLOCK
                    )  # fmt: skip
                    if reporting & (mode % 2 == 1):
                        keep(as_floats(source), weights, cutoff, temperature, vocab_size, processed, BLOCK)
                        values = processed.to(tl.int64)
                        maximum = tl.div_rn(peak, temperature)
            tl.store(tokens + row, token)
            if reporting & (token >= 0):
                report(
                    as_floats(values), maximum, normalised, token, tl.minimum(wanted, max_logprobs),
                    lists + program * TOP, logprobs + row, ranks + row,
                    top_ids + tl.cast(row, tl.int64) * max_logprobs,
                    top_logprobs + tl.cast(row, tl.int64) * max_logprobs, vocab_size, TOP, BLOCK
                )  # fmt: skip
        tl.debug_barrier()


def sample(logits: Tensor, vocab_size: int, sampling: DeviceSampling, num_outputs: int) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.sample`.

    Raises:
        ValueError: the vocabulary has more than 2^19 ids, or a row of logits fewer than ``vocab_size``.
    """
    import torch

    if num_outputs == 0:
        return
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"sampling knows vocabularies of at most 2^19 ids, not {vocab_size}")
    if logits.stride(1) != 1 or logits.shape[1] < vocab_size or len(logits) < num_outputs:
        raise ValueError(
            f"logits must have {num_outputs} rows of {vocab_size} contiguous values, not shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    programs = min(num_outputs, MAX_PROGRAMS)
    max_logprobs = sampling.top_ids.shape[1]
    top = triton.next_power_of_2(max(max_logprobs, 16))
    sample_kernel[(programs,)](
        logits,
        logits.new_empty((programs, 2, vocab_size)),
        torch.empty((programs, top), dtype=torch.int64, device=logits.device),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.choice,
        sampling.position,
        sampling.num_logprobs,
        sampling.logprobs_mode,
        sampling.edits,
        sampling.allowed_mask,
        sampling.grammar_mask,
        sampling.replacement,
        sampling.target,
        sampling.token,
        sampling.logprob,
        sampling.rank,
        sampling.top_ids,
        sampling.top_logprobs,
        logits.stride(0),
        num_outputs,
        vocab_size,
        max_logprobs,
        TOP=top,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
