"""A recorder whose graphs share memory as CUDA's do: what a capture lets go of is used again, and a replay
knows addresses alone. What outlives its time in a graph is overwritten here as it would be there."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

import torch
from helpers.cpu_as_gpu import ReplayRecorder

from streamllm.ops.gpu.tensor_memory import unowned

ALIGNMENT = 512
POISON = 0xFF
"""A byte that makes NaN of floats."""


class PooledRecorder(ReplayRecorder):
    """Takes the memory of tensors that are made during a recording from one pool.

    Attributes:
        pool: that pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(2**22)

    def begin(self) -> None:
        super().begin()
        self._real = torch.empty, torch.empty_like
        torch.empty = self._empty  # type: ignore[assignment]
        torch.empty_like = lambda x: self._empty(*x.shape, dtype=x.dtype, device=x.device)  # type: ignore[assignment]

    def launch(self, operation: Callable[[], Any]) -> None:
        """Runs the operation now and notes it with addresses in the place of its tensors."""
        operation()
        cells = tuple(types.CellType(_address_of(cell.cell_contents)) for cell in operation.__closure__ or ())
        self._operations.append(types.FunctionType(operation.__code__, operation.__globals__, closure=cells))

    def end(self) -> Callable[[], None]:
        torch.empty, torch.empty_like = self._real
        return super().end()

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        return unowned(tensor)

    def _empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        num_bytes = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        flat = torch.frombuffer(self.pool.take(num_bytes), dtype=torch.uint8)
        return flat.view(dtype).view(shape)


def _address_of(value: Any) -> Any:
    return unowned(value) if isinstance(value, torch.Tensor) else value


class Pool:
    """Memory of which the lowest place that is free is given away first, poisoned."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = ctypes.create_string_buffer(num_bytes)
        self._taken: dict[int, int] = {}

    @property
    def num_taken(self) -> int:
        """Pieces that are in use."""
        return len(self._taken)

    def take(self, num_bytes: int) -> ctypes.Array:
        """Memory that goes back when the last tensor over it does."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        place = 0
        for start, taken in sorted(self._taken.items()):
            if start - place >= size:
                break
            place = start + taken
        self._taken[place] = size
        give_back = self._taken.pop

        class Piece(ctypes.c_uint8 * num_bytes):  # type: ignore[misc]
            def __del__(self) -> None:
                give_back(place)

        piece = Piece.from_buffer(self._memory, place)
        ctypes.memset(ctypes.addressof(piece), POISON, num_bytes)
        return piece
