"""Tensors over memory that somebody else owns, on a CPU or a GPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class _DeviceMemory:
    """Bytes of a GPU as torch takes them from other libraries."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor at an address of the device's memory, which must outlive it."""
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    memory: Tensor
    if device.type == "cpu":
        memory = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    else:
        memory = torch.as_tensor(_DeviceMemory(address, num_bytes), device=device)
    return memory.view(dtype).view(shape)


def unowned(tensor: Tensor) -> Tensor:
    """The same strided memory without keeping it: of a tensor in a graph's pool, which may be given to
    operations that come later in the graph."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor_at(tensor.data_ptr(), (span if tensor.numel() else 0,), tensor.dtype, tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride())
