"""Adapters of the native plans: what lies in their slots, and which rows have which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.ops.plan_recorder import address_of, native


@dataclass(frozen=True)
class AdapterSlots:
    """What the slots add to one matrix.

    Attributes:
        native: the table that plans read.
        parts: the first row of each of the matrix's parts -> its number.
        format: how the adapters' elements are kept.
    """

    native: Any
    parts: dict[int, int]
    format: str


@dataclass(frozen=True)
class _PackedUpdate:
    """One update in the layout of the kernels."""

    slots: AdapterSlots
    part: int
    native: Any


class CpuAdapters:
    """The adapters of one model's native plans.

    Args:
        threads: workers of the pool that runs the plans.

    Attributes:
        rows: which rows of the next run have which slot; plans read it.
    """

    def __init__(self, limits: LoraLimits, threads: int):
        self._limits = limits
        self._matrices: dict[str, AdapterSlots] = {}
        self._packed: WeakKeyDictionary[LoraAdapter, list[_PackedUpdate]] = WeakKeyDictionary()
        self.rows = native.LoraRows(limits.max_loras, threads)

    def add_matrix(self, name: str, parts: Sequence[int], columns: int, *, is_float32: bool) -> AdapterSlots:
        """Slots for a matrix of these parts. Beside float32 rows adapters are float32 too, beside smaller
        ones bfloat16: reading several must not take longer than reading the matrix."""
        first_rows = np.cumsum([0, *parts[:-1]]).tolist()
        slots = AdapterSlots(
            native.LoraSlots(list(parts), columns, self._limits.max_loras, self._limits.max_rank),
            {first_row: part for part, first_row in enumerate(first_rows)},
            "float32" if is_float32 else "bfloat16",
        )
        self._matrices[name] = slots
        return slots

    def prepare(self, adapter: LoraAdapter) -> None:
        """Packs an adapter's matrices, once for as long as the adapter is kept."""
        if adapter not in self._packed:
            self._packed[adapter] = [
                self._pack(name, update.first_row, update.a, update.b)
                for name, updates in adapter.updates.items()
                for update in updates
            ]

    def load(self, slot: int, adapter: LoraAdapter | None) -> None:
        for matrix in self._matrices.values():
            matrix.native.clear(slot)
        if adapter is not None:
            self.prepare(adapter)
            for update in self._packed[adapter]:
                update.slots.native.set(slot, update.part, update.native)

    def assign(self, slots: np.ndarray) -> None:
        """Says which rows of the next run have which slot: int32 ``[tokens]``."""
        self.rows.assign(address_of(slots), len(slots))

    def _pack(self, name: str, first_row: int, a: np.ndarray, b: np.ndarray) -> _PackedUpdate:
        slots = self._matrices[name]
        a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
        (rank, k), (rows, b_rank) = a.shape, b.shape
        if rank != b_rank:
            raise ValueError(f"an update of {name} has a {a.shape} and b {b.shape}")
        packed = native.LoraUpdate(address_of(a), address_of(b), rows, rank, k, slots.format)
        return _PackedUpdate(slots, slots.parts[first_row], packed)
