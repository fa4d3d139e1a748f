"""LoRA adapters on a device: what lies in the slots of each adapted matrix.

The slots of a matrix are stacked tensors that never move, so that captured graphs read whatever was loaded
into them last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from streamllm.ops.gpu.kernels import AdapterStack
from streamllm.ops.lora import LoraAdapter, LoraLimits, LoraUpdate


class BaseMatrix(Protocol):
    """What adapters add to: a :class:`streamllm.ops.gpu.gpu_ops.WeightMatrix`."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def gather(self, out: Tensor, ids: Tensor) -> None: ...

    def multiply(self, out: Tensor, x: Tensor) -> None: ...


@dataclass(frozen=True)
class AdaptedMatrix:
    """A weight, and what the slots add to its products."""

    base: BaseMatrix
    stack: AdapterStack

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape

    def gather(self, out: Tensor, ids: Tensor) -> None:
        self.base.gather(out, ids)

    def multiply(self, out: Tensor, x: Tensor) -> None:
        """The base product alone."""
        self.base.multiply(out, x)


@dataclass(frozen=True)
class _Packed:
    """What an adapter adds to one matrix, on the host, as it lies in a slot."""

    stack: AdapterStack
    a: Tensor
    b: Tensor
    rank: int


class DeviceAdapters:
    """The adapters of one model on a device.

    Args:
        dtype: of the activations, and of the adapters' elements.
    """

    def __init__(self, limits: LoraLimits, device: torch.device, dtype: torch.dtype):
        self._limits, self._device, self._dtype = limits, device, dtype
        self._stacks: dict[str, AdapterStack] = {}
        self._packed: WeakKeyDictionary[LoraAdapter, list[_Packed]] = WeakKeyDictionary()
        self._loads: dict[int, LoraAdapter | None] = {}

    def add_matrix(self, name: str, weight: BaseMatrix, parts: Sequence[int]) -> AdaptedMatrix:
        """Empty slots for a matrix whose parts have so many rows each."""
        rows, columns = weight.shape
        slots, rank = self._limits.max_loras, padded_rank(self._limits.max_rank)
        first_rows = tuple(itertools.accumulate(parts[:-1], initial=0))
        stack = AdapterStack(
            a=torch.zeros(slots, len(parts) * rank, columns, dtype=self._dtype, device=self._device),
            b=torch.zeros(slots, rows, rank, dtype=self._dtype, device=self._device),
            ranks=torch.zeros(slots, dtype=torch.int32, device=self._device),
            first_rows=first_rows,
        )
        self._stacks[name] = stack
        return AdaptedMatrix(weight, stack)

    def prepare(self, adapter: LoraAdapter) -> None:
        """Lays an adapter out for the slots, once for as long as it is kept."""
        if adapter not in self._packed:
            self._packed[adapter] = [
                self._pack(self._stacks[name], updates) for name, updates in adapter.updates.items()
            ]

    def load(self, slot: int, adapter: LoraAdapter | None) -> None:
        """Has :meth:`send_loads` put it there."""
        self._loads[slot] = adapter

    def send_loads(self) -> None:
        """Fills the slots that were loaded since the last call; all copies go to the current stream."""
        for slot, adapter in self._loads.items():
            for stack in self._stacks.values():
                stack.ranks[slot] = 0
            if adapter is None:
                continue
            self.prepare(adapter)
            for packed in self._packed[adapter]:
                packed.stack.a[slot].copy_(packed.a, non_blocking=True)
                packed.stack.b[slot].copy_(packed.b, non_blocking=True)
                packed.stack.ranks[slot] = packed.rank
        self._loads.clear()

    def _pack(self, stack: AdapterStack, updates: Sequence[LoraUpdate]) -> _Packed:
        a, b = (self._on_host(tensor.shape[1:]) for tensor in (stack.a, stack.b))
        for update in updates:
            first = stack.first_rows.index(update.first_row) * b.shape[1]
            a[first : first + update.rank] = torch.from_numpy(update.a)
            b[update.first_row : update.first_row + update.rows, : update.rank] = torch.from_numpy(update.b)
        return _Packed(stack, a, b, max(update.rank for update in updates))

    def _on_host(self, shape: torch.Size) -> Tensor:
        """Zeros that copies to the device need not wait for."""
        return torch.zeros(shape, dtype=self._dtype, pin_memory=self._device.type == "cuda")


def padded_rank(rank: int) -> int:
    """Columns of a slot for so large a rank: whole tiles of the kernels, 16 to 64 wide."""
    return max(16, 1 << (rank - 1).bit_length()) if rank <= 64 else -(-rank // 64) * 64
