"""Attention of decode steps by the CUDA kernel (``csrc/cuda/attention_decode.cu``)."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from streamllm.ops.gpu.cuda.library import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, INT8, CudaLibrary
from streamllm.ops.gpu.kernels import SPLIT_SIZE, AttentionShape, DecodeWork, PagedCache, PagedContext

if TYPE_CHECKING:
    import torch

MATRIX_UNITS_FROM = 4
"""Query heads of a group from which on 16-bit keys and values go through the matrix units, whose work does
not grow with them; results differ in the last bits."""

_DTYPES = {
    "torch.float32": FLOAT32,
    "torch.float16": FLOAT16,
    "torch.bfloat16": BFLOAT16,
    "torch.float8_e4m3fn": FLOAT8_E4M3,
    "torch.int8": INT8,
}


class PagedDecodeArgs(ctypes.Structure):
    """``PagedDecodeArgs`` of ``csrc/cuda/attention_decode.cu``."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "out", "q", "keys", "values", "query_start", "context_lens", "table_rows", "block_tables",
                "items", "num_items", "first_item", "num_splits", "partials", "sinks",
            )
        ),
        *((name, ctypes.c_int64) for name in ("out_stride", "q_stride", "block_table_stride")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_sequences", "max_items", "split_size", "num_heads", "num_kv_heads", "head_dim",
                "block_size", "window",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap", "key_scale", "value_scale")),
        *(
            (name, ctypes.c_int32)
            for name in ("dtype", "cache_dtype", "num_multiprocessors", "matrix_units_from")
        ),
    ]  # fmt: skip


def paged_decode(
    library: CudaLibrary,
    out: torch.Tensor,
    q: torch.Tensor,
    cache: PagedCache,
    context: PagedContext,
    work: DecodeWork,
    shape: AttentionShape,
    num_multiprocessors: int,
    stream: int,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.paged_decode`.

    Args:
        num_multiprocessors: the GPU's: how many thread blocks there are follows from it.

    Raises:
        ValueError: a tensor does not have the shape, dtype or layout that the interface names, or there is no
            kernel for it (head sizes are multiples of 8, with float8 and int8 of 16, up to 256; block sizes
            multiples of 16).
    """
    num_sequences = context.context_lens.shape[0]
    if num_sequences == 0:
        return
    _check(out, q, cache, context, work, shape)
    arguments = PagedDecodeArgs(
        out.data_ptr(),
        q.data_ptr(),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        context.query_start.data_ptr(),
        context.context_lens.data_ptr(),
        context.table_rows.data_ptr(),
        context.block_tables.data_ptr(),
        work.items.data_ptr(),
        work.num_items.data_ptr(),
        work.first_item.data_ptr(),
        work.num_splits.data_ptr(),
        work.partials.data_ptr(),
        None if shape.sinks is None else shape.sinks.data_ptr(),
        out.stride(0),
        q.stride(0),
        context.block_tables.stride(0),
        num_sequences,
        work.items.shape[0],
        SPLIT_SIZE,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        cache.keys.shape[2],
        shape.window,
        shape.scale,
        shape.soft_cap,
        cache.key_scale,
        cache.value_scale,
        _code(q.dtype),
        _code(cache.keys.dtype),
        num_multiprocessors,
        MATRIX_UNITS_FROM,
    )
    library.call("paged_decode", arguments, stream)


def _check(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: PagedCache,
    context: PagedContext,
    work: DecodeWork,
    shape: AttentionShape,
) -> None:
    sequences, items = context.context_lens.shape[0], work.items.shape[0]
    width = shape.num_heads * shape.head_dim
    int32, float32 = _dtypes()
    activations, stored = q.dtype, cache.keys.dtype
    wanted_cache = (cache.keys.shape[0], shape.num_kv_heads, cache.keys.shape[2], shape.head_dim)
    for name, tensor, wanted, dtype in (
        ("out", out, (len(q), width), activations),
        ("q", q, (len(q), width), activations),
        ("keys", cache.keys, wanted_cache, stored),
        ("values", cache.values, wanted_cache, stored),
        ("query_start", context.query_start, (sequences + 1,), int32),
        ("context_lens", context.context_lens, (sequences,), int32),
        ("table_rows", context.table_rows, (sequences,), int32),
        ("block_tables", context.block_tables, context.block_tables.shape, int32),
        ("items", work.items, (items, 2), int32),
        ("num_items", work.num_items, (1,), int32),
        ("first_item", work.first_item, (sequences,), int32),
        ("num_splits", work.num_splits, (sequences,), int32),
        ("partials", work.partials, (items, shape.num_heads, shape.head_dim + 2), float32),
        ("sinks", shape.sinks, (shape.num_heads,), float32),
    ):
        if tensor is None:
            continue
        if tensor.shape != wanted or tensor.dtype != dtype:
            raise ValueError(
                f"paged_decode: {name} must be {dtype} {list(wanted)}, not {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        if name in ("keys", "values"):
            continue
        rows_may_be_apart = name in ("out", "q", "block_tables")
        if not (tensor.stride(1) == 1 if rows_may_be_apart else tensor.is_contiguous()):
            raise ValueError(f"paged_decode: {name} must be contiguous")
    if not cache.is_laid_out:
        raise ValueError("paged_decode: keys and values, and scales of int8, must lie as PagedCache has them")


@functools.cache
def _code(dtype: torch.dtype) -> int:
    return _DTYPES.get(str(dtype), -1)


@functools.cache
def _dtypes() -> tuple[torch.dtype, torch.dtype]:
    import torch

    return torch.int32, torch.float32
