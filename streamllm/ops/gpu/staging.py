"""Small arrays side by side in one piece of memory, so that one copy moves them all to or from a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes at whose multiples arrays begin: whole cache lines, and enough for any vector load."""

_TORCH_DTYPES: dict[Any, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Layout:
    """Where named arrays lie.

    Args:
        arrays: name -> (numpy dtype, shape), in the order in which they lie.
    """

    def __init__(self, arrays: Mapping[str, tuple[Any, tuple[int, ...]]]):
        self._places: dict[str, tuple[int, Any, tuple[int, ...]]] = {}
        self.num_bytes = 0
        for name, (dtype, shape) in arrays.items():
            self._places[name] = (self.num_bytes, np.dtype(dtype), shape)
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            self.num_bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def start(self, name: str) -> int:
        """The byte at which an array begins."""
        return self._places[name][0]

    def allocate(self, device: torch.device, *, pinned: bool = False) -> Tensor:
        """Zeroed memory for all of them: uint8 ``[num_bytes]``."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def arrays(self, memory: Tensor) -> dict[str, np.ndarray]:
        """Views of host memory."""
        raw = memory.numpy()
        return {
            name: raw[start : start + dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)
            for name, (start, dtype, shape) in self._places.items()
        }

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Views of a device's memory; unsigned 64-bit numbers as their bits."""
        return {
            name: memory[start : start + dtype.itemsize * int(np.prod(shape))]
            .view(_TORCH_DTYPES[dtype])
            .view(shape)
            for name, (start, dtype, shape) in self._places.items()
        }
