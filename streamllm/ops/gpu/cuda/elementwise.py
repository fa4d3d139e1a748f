"""Norms, activations, the rotary embedding with its cache write, and block copies by the CUDA kernels
(``csrc/cuda/elementwise.cu``, ``rotary_cache.cu`` and ``copy_blocks.cu``).

What a kernel cannot know from addresses, shapes and strides, is compared before every call, in one
expression; its parts are told apart only when it is false.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from streamllm.ops import Activation
from streamllm.ops.gpu.cuda.library import BFLOAT16, FLOAT8_E4M3, FLOAT16, FLOAT32, INT8, CudaLibrary
from streamllm.ops.gpu.kernels import AttentionShape, PagedCache

if TYPE_CHECKING:
    import torch

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
"""Those that the kernel knows, with its numbers for them."""

_ADDRESS, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class RmsNormArgs(ctypes.Structure):
    """``RmsNormArgs`` of ``elementwise.cu``; ``residual`` may be null, its stride then 0."""

    _fields_ = [
        ("out", _ADDRESS),
        ("x", _ADDRESS),
        ("residual", _ADDRESS),
        ("weight", _ADDRESS),
        ("out_stride", _INT64),
        ("x_stride", _INT64),
        ("residual_stride", _INT64),
        ("rows", _INT32),
        ("size", _INT32),
        ("dtype", _INT32),
        ("eps", _FLOAT),
    ]


class ActAndMulArgs(ctypes.Structure):
    """``ActAndMulArgs`` of ``elementwise.cu``."""

    _fields_ = [
        ("out", _ADDRESS),
        ("x", _ADDRESS),
        ("out_stride", _INT64),
        ("x_stride", _INT64),
        ("rows", _INT32),
        ("width", _INT32),
        ("dtype", _INT32),
        ("activation", _INT32),
    ]


class RotaryAndCacheArgs(ctypes.Structure):
    """``RotaryAndCacheArgs`` of ``rotary_cache.cu``; norms may be null."""

    _fields_ = [
        ("qkv", _ADDRESS),
        ("keys", _ADDRESS),
        ("values", _ADDRESS),
        ("slot_mapping", _ADDRESS),
        ("rope_rows", _ADDRESS),
        ("rope_cos", _ADDRESS),
        ("rope_sin", _ADDRESS),
        ("q_norm", _ADDRESS),
        ("k_norm", _ADDRESS),
        ("qkv_stride", _INT64),
        ("tokens", _INT32),
        ("num_heads", _INT32),
        ("num_kv_heads", _INT32),
        ("head_dim", _INT32),
        ("rotary_dim", _INT32),
        ("block_size", _INT32),
        ("dtype", _INT32),
        ("cache_dtype", _INT32),
        ("norm_eps", _FLOAT),
        ("key_scale", _FLOAT),
        ("value_scale", _FLOAT),
    ]


class CopyBlocksArgs(ctypes.Structure):
    """``CopyBlocksArgs`` of ``copy_blocks.cu``."""

    _fields_ = [
        ("source", _ADDRESS),
        ("destination", _ADDRESS),
        ("pairs", _ADDRESS),
        ("source_plane_bytes", _INT64),
        ("destination_plane_bytes", _INT64),
        ("block_bytes", _INT64),
        ("planes", _INT32),
        ("num_pairs", _INT32),
    ]


def rms_norm(
    library: CudaLibrary,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    stream: int,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.rms_norm`; ``out`` may be ``x``.

    Raises:
        ValueError: shapes, strides or dtypes do not agree, or rows are longer than the kernel supports
            (16,384 values).
    """
    rows, size = x.shape
    out_stride, x_stride = out.stride(), x.stride()
    if not (
        out.shape == x.shape
        and out.dtype == x.dtype
        and (out_stride[1] == 1 == x_stride[1] or size == 1)
        and weight.shape == (size,)
        and weight.is_contiguous()
        and _is_float32(weight)
        and (residual is None or _same_rows(residual, x))
    ):
        raise ValueError(
            f"rms_norm needs out, x and residual of one shape and dtype with contiguous rows, and a float32 "
            f"weight of their width, not {_described(out, x, residual, weight)}"
        )
    arguments = RmsNormArgs(
        out.data_ptr(),
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out_stride[0],
        x_stride[0],
        0 if residual is None else residual.stride(0),
        rows,
        size,
        _dtype_code(x.dtype),
        eps,
    )
    library.call("rms_norm", arguments, stream)


def act_and_mul(
    library: CudaLibrary, out: torch.Tensor, x: torch.Tensor, activation: Activation, stream: int
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.act_and_mul`.

    Raises:
        ValueError: shapes, strides or dtypes do not agree.
    """
    rows, width = out.shape
    out_stride, x_stride = out.stride(), x.stride()
    if not (
        x.shape == (rows, 2 * width)
        and x.dtype == out.dtype
        and x_stride[1] == 1
        and (out_stride[1] == 1 or width == 1)
    ):
        raise ValueError(
            f"act_and_mul needs x twice as wide as out, of its dtype, with contiguous rows, not "
            f"{_described(out, x)}"
        )
    arguments = ActAndMulArgs(
        out.data_ptr(),
        x.data_ptr(),
        out_stride[0],
        x_stride[0],
        rows,
        width,
        _dtype_code(x.dtype),
        ACTIVATIONS[activation],
    )
    library.call("act_and_mul", arguments, stream)


def rotary_and_cache(
    library: CudaLibrary,
    qkv: torch.Tensor,
    cache: PagedCache,
    slot_mapping: torch.Tensor,
    rope_rows: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    shape: AttentionShape,
    rotary_dim: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    stream: int,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.rotary_and_cache`.

    Raises:
        ValueError: shapes, strides or dtypes do not agree; a head is wider than 256 or of odd width.
    """
    tokens, width = qkv.shape
    keys, values = cache.keys, cache.values
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    q_norm, k_norm, eps = norms if norms is not None else (None, None, 0.0)
    stride = qkv.stride()
    if not (
        width == (heads + 2 * kv_heads) * head_dim
        and stride[1] == 1
        and keys.shape == values.shape == (len(keys), kv_heads, keys.shape[2], head_dim)
        and keys.dtype == values.dtype
        and cache.is_laid_out
        and slot_mapping.shape == rope_rows.shape == (tokens,)
        and slot_mapping.element_size() == 8
        and rope_rows.element_size() == 4
        and slot_mapping.is_contiguous()
        and rope_rows.is_contiguous()
        and rope_cos.shape == rope_sin.shape == (len(rope_cos), rotary_dim // 2)
        and rope_cos.is_contiguous()
        and rope_sin.is_contiguous()
        and _is_float32(rope_cos)
        and _is_float32(rope_sin)
        and (q_norm is None or (_is_float32(q_norm) and q_norm.shape == (head_dim,)))
        and (k_norm is None or (_is_float32(k_norm) and k_norm.shape == (head_dim,)))
    ):
        raise ValueError(
            f"rotary_and_cache: qkv, keys, values, slots (int64), rope_rows (int32), cos and sin (float32) "
            f"and norms do not agree with {heads} heads and {kv_heads} KV heads of {head_dim}, of which "
            f"{rotary_dim} are rotated: "
            f"{_described(qkv, keys, values, slot_mapping, rope_rows, rope_cos, rope_sin, q_norm, k_norm)}"
        )
    arguments = RotaryAndCacheArgs(
        qkv.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        slot_mapping.data_ptr(),
        rope_rows.data_ptr(),
        rope_cos.data_ptr(),
        rope_sin.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        stride[0],
        tokens,
        heads,
        kv_heads,
        head_dim,
        rotary_dim,
        keys.shape[2],
        _dtype_code(qkv.dtype),
        _dtype_code(keys.dtype),
        eps,
        cache.key_scale,
        cache.value_scale,
    )
    library.call("rotary_and_cache", arguments, stream)


def copy_blocks(
    library: CudaLibrary,
    source: torch.Tensor,
    destination: torch.Tensor,
    pairs: torch.Tensor,
    stream: int,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.copy_blocks`; host memory must be pinned, which makes its
    address one of the GPU's too (what any other does to the process is not found out here).

    Raises:
        ValueError: shapes, strides or dtypes do not agree.
    """
    planes, _, block_bytes = source.shape
    if not (
        destination.shape == (planes, destination.shape[1], block_bytes)
        and source.element_size() == destination.element_size() == 1
        and source.stride()[1:] == destination.stride()[1:] == (block_bytes, 1)
        and pairs.dim() == 2
        and pairs.shape[1] == 2
        and pairs.element_size() == 4
        and pairs.is_contiguous()
    ):
        raise ValueError(
            f"copy_blocks needs uint8 [planes, blocks, bytes] twice and int32 [n, 2], not "
            f"{_described(source, destination, pairs)}"
        )
    arguments = CopyBlocksArgs(
        source.data_ptr(),
        destination.data_ptr(),
        pairs.data_ptr(),
        source.stride(0),
        destination.stride(0),
        block_bytes,
        planes,
        len(pairs),
    )
    library.call("copy_blocks", arguments, stream)


@functools.cache
def _dtype_code(dtype: torch.dtype) -> int:
    """
    Raises:
        ValueError: the kernels have no code for it.
    """
    import torch

    codes = {
        torch.float32: FLOAT32,
        torch.float16: FLOAT16,
        torch.bfloat16: BFLOAT16,
        torch.float8_e4m3fn: FLOAT8_E4M3,
        torch.int8: INT8,
    }
    if dtype not in codes:
        raise ValueError(f"there are no CUDA kernels for {dtype}; there are for {', '.join(map(str, codes))}")
    return codes[dtype]


def _is_float32(tensor: torch.Tensor) -> bool:
    return _dtype_code(tensor.dtype) == FLOAT32


def _same_rows(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    return (
        tensor.shape == like.shape
        and tensor.dtype == like.dtype
        and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
    )


def _described(*tensors: torch.Tensor | None) -> str:
    return ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} (strides {list(tensor.stride())})"
        for tensor in tensors
        if tensor is not None
    )
