"""Block copies: copy-on-write within a pool, swapping between two."""

from __future__ import annotations

import triton
import triton.language as tl

from streamllm.ops.gpu.kernels import Tensor

WORDS_PER_PROGRAM = 1024


@triton.jit
def copy_blocks_kernel(
    source,
    destination,
    pairs,
    words,
    source_plane,
    destination_plane,
    source_block,
    destination_block,
    BLOCK: tl.constexpr,
):
    """Grid: pairs, planes, parts of a block. ``words`` is a block's size; planes and blocks are that many
    words apart."""
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    read = tl.load(pairs + 2 * pair).to(tl.int64)
    written = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    copied = tl.load(source + plane * source_plane + read * source_block + word, mask=word < words)
    pointers = destination + plane * destination_plane + written * destination_block + word
    tl.store(pointers, copied, mask=word < words)


def copy_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.copy_blocks`."""
    planes, _, size = source.shape
    if not len(pairs):
        return
    source, destination = _as_words(source, destination)
    size = source.shape[2]
    copy_blocks_kernel[len(pairs), planes, triton.cdiv(size, WORDS_PER_PROGRAM)](
        source,
        destination,
        pairs,
        size,
        source.stride(0),
        destination.stride(0),
        source.stride(1),
        destination.stride(1),
        BLOCK=WORDS_PER_PROGRAM,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _as_words(source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor]:
    """Both as int64 where every block begins and ends at a multiple of 8 bytes, else as they are."""
    import torch

    places = (t.data_ptr() | t.stride(0) | t.stride(1) | t.shape[2] for t in (source, destination))
    if any(place % 8 for place in places):
        return source, destination
    return source.view(torch.int64), destination.view(torch.int64)
