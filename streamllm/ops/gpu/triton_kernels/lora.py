"""What LoRA adapters add to products (the shrink and expand of Punica, Chen et al. 2023, and S-LoRA, Sheng et
al. 2023).

The first kernel multiplies rows by their adapters' ``a`` into partial results over fixed ranges of the
columns, the second adds these up in order and multiplies by ``b``. A program owns ``BLOCK_M`` rows in a row
and takes the adapters that they have one after the other, so that each is read once for all of them; rows
without one end it at once. Tiles and ranges follow from the matrix alone, so no row's bits depend on the
batch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from streamllm.ops.gpu.kernels import AdapterStack, Tensor

BLOCK_M = 16
"""Rows of a program: a matrix unit's fewest, so that a decode's mixed adapters multiply little in vain."""

MAX_SPLITS = 16
"""Ranges that the columns of a matrix are cut into at most."""

NO_SLOT = tl.constexpr(2**30)


@triton.jit
def next_slot(slots, after):
    """The smallest slot above ``after``, :data:`NO_SLOT` if there is none."""
    return tl.min(tl.where(slots > after, slots, NO_SLOT), 0)


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    partials,
    x,
    a,
    slots,
    ranks,
    num_rows,
    x_stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: tiles of rows, tiles of all parts' ranks, ranges of columns."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    slot = next_slot(row_slot, -1)
    if slot == NO_SLOT:
        return
    first_rank = tl.program_id(1) * BLOCK_R
    rank_row = first_rank + tl.arange(0, BLOCK_R)
    begin = tl.program_id(2) * SPLIT_K
    result = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    while slot != NO_SLOT:
        mine = row_slot == slot
        if first_rank % RANK < tl.load(ranks + slot):
            a_rows = a + (slot.to(tl.int64) * (PARTS * RANK) + rank_row) * K
            sums = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for start in range(begin, tl.minimum(begin + SPLIT_K, K), BLOCK_K):
                column = start + tl.arange(0, BLOCK_K)
                x_tile = tl.load(
                    x + row.to(tl.int64)[:, None] * x_stride + column[None, :],
                    mask=mine[:, None] & (column[None, :] < K),
                    other=0.0,
                )
                a_tile = tl.load(a_rows[:, None] + column[None, :], mask=column[None, :] < K, other=0.0)
                sums = tl.dot(x_tile, tl.trans(a_tile), sums, input_precision="ieee")
            result = tl.where(mine[:, None], sums, result)
        slot = next_slot(row_slot, slot)
    place = (tl.program_id(2).to(tl.int64) * num_rows + row) * (PARTS * RANK)
    tl.store(partials + place[:, None] + rank_row[None, :], result, mask=(row_slot >= 0)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    out,
    partials,
    b,
    slots,
    ranks,
    tiles,
    num_rows,
    out_stride,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: tiles of rows, ``tiles`` of columns: int32 ``[*, 3]``, the first column, the end, the part."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    slot = next_slot(row_slot, -1)
    if slot == NO_SLOT:
        return
    tile = tiles + tl.program_id(1) * 3
    column = tl.load(tile) + tl.arange(0, BLOCK_N)
    inside = column < tl.load(tile + 1)
    first_rank = tl.load(tile + 2) * RANK
    result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    while slot != NO_SLOT:
        mine = row_slot == slot
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, tl.load(ranks + slot), BLOCK_R):
            rank = start + tl.arange(0, BLOCK_R)
            narrow = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for split in tl.static_range(SPLITS):
                place = (row.to(tl.int64) + split * num_rows) * (PARTS * RANK) + first_rank
                narrow += tl.load(partials + place[:, None] + rank[None, :], mask=mine[:, None], other=0.0)
            b_tile = tl.load(
                b + (slot.to(tl.int64) * N + column)[:, None] * RANK + rank[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            sums = tl.dot(narrow.to(b_tile.dtype), tl.trans(b_tile), sums, input_precision="ieee")
        result = tl.where(mine[:, None], sums, result)
        slot = next_slot(row_slot, slot)
    pointers = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    touched = (row_slot >= 0)[:, None] & inside[None, :]
    total = tl.load(pointers, mask=touched, other=0.0).to(tl.float32) + result
    tl.store(pointers, total.to(out.dtype.element_ty), mask=touched)


def lora_add(out: Tensor, x: Tensor, slots: Tensor, stack: AdapterStack) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.lora_add`."""
    rows, columns = x.shape
    if not rows:
        return
    parts, rank, wide = len(stack.first_rows), stack.b.shape[2], x.element_size() == 4
    block_k, block_r = (64 if wide else 128), min(rank, 64)
    block_n = 64 if wide or block_r > 32 else 128
    split_columns = triton.next_power_of_2(max(triton.cdiv(columns, MAX_SPLITS), 2 * block_k))
    splits = triton.cdiv(columns, split_columns)
    partials = torch.empty(splits, rows, parts * rank, dtype=torch.float32, device=x.device)
    row_tiles = triton.cdiv(rows, BLOCK_M)
    shrink_kernel[row_tiles, parts * rank // block_r, splits](
        partials,
        x,
        stack.a,
        slots,
        stack.ranks,
        rows,
        x.stride(0),
        K=columns,
        PARTS=parts,
        RANK=rank,
        SPLIT_K=split_columns,
        BLOCK_M=BLOCK_M,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )
    tiles = _column_tiles(stack.first_rows, out.shape[1], block_n, out.device)
    expand_kernel[row_tiles, len(tiles)](
        out,
        partials,
        stack.b,
        slots,
        stack.ranks,
        tiles,
        rows,
        out.stride(0),
        N=out.shape[1],
        PARTS=parts,
        RANK=rank,
        SPLITS=splits,
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )


@functools.cache
def _column_tiles(first_rows: tuple[int, ...], end: int, block_n: int, device: torch.device) -> Tensor:
    """int32 ``[*, 3]``: (first column, end, part) of tiles that lie within one part each."""
    ends = (*first_rows[1:], end)
    tiles = [
        (first, min(first + block_n, part_end), part)
        for part, (part_first, part_end) in enumerate(zip(first_rows, ends, strict=True))
        for first in range(part_first, part_end, block_n)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device)
