"""Sampling by the CUDA kernel (``csrc/cuda/sampling.cu``)."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from streamllm.ops.gpu.cuda.library import CudaLibrary
from streamllm.ops.gpu.kernels import DeviceSampling

if TYPE_CHECKING:
    import torch

NUM_THREADS = 1024
"""Of a block; results do not depend on it."""

MAX_BLOCKS = 148
"""Rows beyond this wait for earlier ones, which bounds the scratch memory. A block fills a multiprocessor,
and GPUs have no more of them (H100: 132, B200: 148)."""

ARRAYS = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "seed": "int64",
    "choice": "int32",
    "position": "int32",
    "num_logprobs": "int32",
    "logprobs_mode": "int32",
    "edits": "int64",
    "allowed_mask": "int64",
    "grammar_mask": "int64",
    "replacement": "int64",
    "target": "int32",
    "token": "int32",
    "logprob": "float32",
    "rank": "int32",
    "top_ids": "int32",
    "top_logprobs": "float32",
}
"""Sampling's arrays in the kernel's order, and their dtypes."""


class SampleArgs(ctypes.Structure):
    """``SampleArgs`` of ``csrc/cuda/sampling.cu``: addresses of the logits, of scratch memory and of
    sampling's arrays, then sizes."""

    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ARRAYS),
        ("logits_stride", ctypes.c_int64),
        ("num_outputs", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("max_logprobs", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    ]


def sample(
    library: CudaLibrary,
    logits: torch.Tensor,
    vocab_size: int,
    sampling: DeviceSampling,
    num_outputs: int,
    stream: int,
) -> None:
    """:meth:`streamllm.ops.gpu.kernels.GpuKernels.sample`.

    Raises:
        ValueError: the vocabulary has more than 2^19 ids, a row of logits fewer than ``vocab_size``, or a
            tensor is not what the interface says.
    """
    if num_outputs == 0:
        return
    _check(logits, vocab_size, sampling, num_outputs)
    num_blocks = min(num_outputs, MAX_BLOCKS)
    # One for each block: a copy of the row's logits, and its weights.
    scratch = logits.new_empty((num_blocks, 2, vocab_size))
    arguments = SampleArgs(
        logits.data_ptr(),
        scratch.data_ptr(),
        *(getattr(sampling, name).data_ptr() for name in ARRAYS),
        logits.stride(0),
        num_outputs,
        vocab_size,
        sampling.top_ids.shape[1],
        num_blocks,
        NUM_THREADS,
    )
    library.call("sample", arguments, stream)


def _check(logits: torch.Tensor, vocab_size: int, sampling: DeviceSampling, num_outputs: int) -> None:
    dtypes = _dtypes()
    if logits.dtype is not dtypes["logits"]:
        raise ValueError(f"logits must be float32, not {logits.dtype}")
    if logits.stride(1) != 1 or logits.shape[1] < vocab_size or len(logits) < num_outputs:
        raise ValueError(
            f"logits must have {num_outputs} rows of {vocab_size} contiguous values, not shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    if sampling.top_ids.shape != sampling.top_logprobs.shape:
        raise ValueError(
            f"top_ids and top_logprobs must have one shape, not {tuple(sampling.top_ids.shape)} and "
            f"{tuple(sampling.top_logprobs.shape)}"
        )
    for name, dtype in ARRAYS.items():
        tensor = getattr(sampling, name)
        if tensor.dtype is not dtypes[name] or len(tensor) < num_outputs or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} with {num_outputs} rows or more, not {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}"
            )


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    import torch

    return {name: getattr(torch, dtype) for name, dtype in ARRAYS.items()} | {"logits": torch.float32}
