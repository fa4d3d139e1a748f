"""Which experts each row uses, and the rows of each expert in blocks, worked out on the GPU: nothing of it
reaches the host, so that a graph can hold it.

A row's use of an expert is a pair, whose number is ``row * top_k + choice``. A row's choices are in order of
the experts' numbers. (Blocks of one expert each: an idea of vLLM's.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from streamllm.ops.gpu.kernels import Tensor

SCANNED = 1024
"""Pairs that a program looks at at a time."""

LEAST_KEY = tl.constexpr(-(2**31))


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """The pairs of a step.

    Attributes:
        weights: float32 ``[rows, top_k]``, of each pair.
        pairs: int32 ``[blocks * block_rows]``, by expert; an expert's last block is filled up with the number
            of pairs.
        block_experts: int32 ``[blocks]``: whose block it is; -1 behind the last.
        block_rows: pairs of a block.
    """

    weights: Tensor
    pairs: Tensor
    block_experts: Tensor
    block_rows: int


@triton.jit
def route_kernel(
    chosen,
    weights,
    logits,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows. The experts with the largest logits, ascending, and their weights."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < NUM_EXPERTS
    scores = tl.load(logits + row * logits_stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    # Integers in the order of the scores, NaN with infinity and both zeros equal. What was taken, or does not
    # exist, is below -inf: so TOP_K experts are always found.
    ranked = tl.where(scores != scores, float("inf"), tl.where(scores == 0.0, 0.0, scores))
    bits = ranked.to(tl.int32, bitcast=True)
    keys = tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST_KEY)
    for _ in range(TOP_K):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        keys = tl.where(expert == best, LEAST_KEY, keys)
    is_chosen = exists & (keys == LEAST_KEY)
    counted = is_chosen if NORMALIZE else exists
    largest = tl.max(tl.where(counted, scores, float("-inf")), 0)
    parts = tl.where(counted, tl.exp(scores - largest), 0.0)
    place = row * TOP_K + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + place, expert, mask=is_chosen)
    tl.store(weights + place, parts / tl.sum(parts, 0), mask=is_chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(counts, chosen, num_pairs, SCANNED: tl.constexpr):
    """Grid: experts. How many pairs an expert has."""
    expert = tl.program_id(0)
    found = tl.zeros((SCANNED,), tl.int32)
    for start in range(0, num_pairs, SCANNED):
        pair = start + tl.arange(0, SCANNED)
        found += (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_kernel(
    pairs,
    block_experts,
    chosen,
    counts,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCANNED: tl.constexpr,
):
    """Grid: experts. Writes the blocks of one, which stand behind those of the lower ones; the last expert
    marks what is left over.

    Args:
        EXPERTS: a power of two, at least NUM_EXPERTS.
    """
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    blocks = tl.cdiv(tl.load(counts + other, mask=other < NUM_EXPERTS, other=0), BLOCK_ROWS)
    first = tl.sum(tl.where(other < expert, blocks, 0), 0)
    last = tl.sum(tl.where(other <= expert, blocks, 0), 0)
    place = first * BLOCK_ROWS
    for start in range(0, num_pairs, SCANNED):
        pair = start + tl.arange(0, SCANNED)
        is_own = (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    filling = place + tl.arange(0, BLOCK_ROWS)
    tl.store(pairs + filling, tl.zeros_like(filling) + num_pairs, mask=filling < last * BLOCK_ROWS)
    for block in range(first, last):
        tl.store(block_experts + block, expert)
    if expert == NUM_EXPERTS - 1:
        for block in range(last, num_blocks):
            tl.store(block_experts + block, -1)


def route(
    router_logits: Tensor, num_experts: int, top_k: int, *, normalize: bool, block_rows: int
) -> ExpertBlocks:
    """The pairs of the rows of ``router_logits [rows, num_experts]``, at least one, as
    :class:`streamllm.ops.Experts` says.

    Args:
        block_rows: a power of two.
    """
    rows, device = len(router_logits), router_logits.device
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    width = triton.next_power_of_2(num_experts)
    route_kernel[(rows,)](
        chosen,
        weights,
        router_logits,
        router_logits.stride(0),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        BLOCK=width,
        num_warps=1,
    )
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    count_kernel[(num_experts,)](counts, chosen, chosen.numel(), SCANNED=SCANNED, num_warps=4)
    blocks = most_blocks(chosen.numel(), num_experts, block_rows)
    pairs = torch.empty(blocks * block_rows, dtype=torch.int32, device=device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=device)
    place_kernel[(num_experts,)](
        pairs,
        block_experts,
        chosen,
        counts,
        chosen.numel(),
        blocks,
        NUM_EXPERTS=num_experts,
        EXPERTS=width,
        BLOCK_ROWS=block_rows,
        SCANNED=SCANNED,
        num_warps=4,
    )
    return ExpertBlocks(weights, pairs, block_experts, block_rows)


def most_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The blocks that the pairs take at most, however they are spread over the experts."""
    return (num_pairs + min(num_experts, num_pairs) * (block_rows - 1)) // block_rows
