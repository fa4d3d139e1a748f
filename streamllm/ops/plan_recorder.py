"""Recording of native plans: symbolic buffers, and where they lie.

Operations are noted over symbolic buffers. :meth:`PlanRecorder.compile` then knows when each buffer is used
for the last time, places them in one arena where dead ones are reused, and emits a native plan that is
replayed with a single call a step, without the interpreter lock. What only products with quantised weights
read is written quantised to begin with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamllm.errors import ModelLoadError

try:
    import streamllm._native as native
except ImportError as error:
    raise ModelLoadError(
        "streamllm's CPU kernels are not built for this Python; run `pip install -e .` in its folder "
        f"({error})."
    ) from error

ALIGNMENT = 64


@dataclass(eq=False, slots=True)
class PlanBuffer:
    """Activations ``[rows, width]`` float32 in a plan's arena.

    Attributes:
        on_outputs: one row an output instead of one a token.
        width: elements of a row that count.
        stride: elements from row to row.
        address: where it lies; 0 until its plan is compiled.
        quantized: the rows are 8-bit groups instead, ``[width / 32, rows]``, as products with quantised
            weights read them; known when its plan is compiled.
        rows_per_token: how many there are for each token, or output.
    """

    on_outputs: bool
    width: int
    stride: int
    address: int = 0
    quantized: bool = False
    rows_per_token: int = 1


@dataclass(frozen=True)
class _Operation:
    """One recorded call.

    Attributes:
        buffers: all that it reads or writes.
        emit: adds it to a native plan.
        quantizable: those of ``buffers`` that it can write, or read, quantised.
    """

    buffers: tuple[PlanBuffer, ...]
    emit: Callable[[Any], None]
    quantizable: frozenset[PlanBuffer]


def row_stride(width: int) -> int:
    """Elements between rows: whole cache lines, and never a multiple of 1 KiB, so that the same column of
    successive rows does not fall into one cache set."""
    stride = -(-width // 16) * 16
    return stride + 16 if stride * 4 % 1024 == 0 else stride


def address_of(array: np.ndarray | None) -> int:
    """Where its elements lie; 0 for none."""
    return 0 if array is None else array.ctypes.data


def _aligned(num_bytes: int) -> np.ndarray:
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def whole_groups(out: PlanBuffer, width: int) -> frozenset[PlanBuffer]:
    """``out`` if it can be written quantised, ``width`` elements at a time, for all tokens."""
    return frozenset() if out.on_outputs or width % native.GROUP else frozenset([out])


def _choose_quantized(operations: Sequence[_Operation], keep: Sequence[PlanBuffer]) -> None:
    """Marks the buffers that one operation can write quantised and all others read so."""
    written = {buffer for operation in operations for buffer in operation.buffers if not buffer.address}
    for operation in operations:
        written -= set(operation.buffers) - operation.quantizable
    for buffer in written - set(keep):
        buffer.quantized = True


class CompiledPlan:
    """A native plan with all that its addresses point to."""

    def __init__(self, plan: Any, arena: np.ndarray, references: Sequence[Any]):
        self.native = plan
        self.arena = arena
        self._references = references

    def read(self, buffer: PlanBuffer, num_rows: int) -> np.ndarray:
        """The first rows of a kept buffer, float32 ``[num_rows, width]``: a view."""
        start = buffer.address - self.arena.ctypes.data
        flat = self.arena[start : start + num_rows * buffer.stride * 4].view(np.float32)
        return flat.reshape(num_rows, buffer.stride)[:, : buffer.width]


class PlanRecorder:
    """Operations over symbolic buffers, recorded until they are compiled.

    Args:
        threads: workers of the pool that runs the plans.
        max_tokens, max_outputs: rows that buffers have room for.
    """

    def __init__(self, *, threads: int, max_tokens: int, max_outputs: int):
        self.pool = native.ThreadPool(threads)
        self._max_tokens = max_tokens
        self._max_outputs = max_outputs
        self._operations: list[_Operation] = []
        self._references: list[Any] = []

    def host_call(self, buffers: Sequence[PlanBuffer], function: Callable[..., None]) -> None:
        """Records a call of ``function`` with the rows of each buffer, to read or to write.

        It is called on the thread that drives the plan, at its place among the operations, unless there are
        no rows. What it raises ends the run and comes out of the native plan's ``wait()``.

        Args:
            buffers: at least one, all of them either on outputs or not.
            function: takes as many arrays, float32 ``[rows, width]``, valid until it returns.
        """
        on_outputs = buffers[0].on_outputs
        if any(buffer.on_outputs != on_outputs or buffer.rows_per_token != 1 for buffer in buffers):
            raise ValueError("the buffers of a host call must have equally many rows")

        def emit(plan: Any) -> None:
            arrays = [self._array(buffer) for buffer in buffers]
            plan.call(lambda num_rows: function(*[array[:num_rows] for array in arrays]), on_outputs)

        self._record(tuple(buffers), emit)

    def compile(self, keep: Sequence[PlanBuffer] = ()) -> CompiledPlan:
        """Turns what was recorded since the last call into a plan.

        Args:
            keep: buffers that must still hold their values when the plan has run.
        """
        operations, self._operations = self._operations, []
        references, self._references = self._references, []
        _choose_quantized(operations, keep)
        arena = self._place(operations, keep)
        plan = native.Plan(self.pool)
        for operation in operations:
            operation.emit(plan)
        return CompiledPlan(plan, arena, [self.pool, *references])

    def new_buffer(self, width: int, *, on_outputs: bool = False, rows_per_token: int = 1) -> PlanBuffer:
        """What an operation writes."""
        return PlanBuffer(on_outputs, width, row_stride(width), rows_per_token=rows_per_token)

    def _record(
        self,
        buffers: tuple[PlanBuffer, ...],
        emit: Callable[[Any], None],
        *references: object,
        quantizable: frozenset[PlanBuffer] = frozenset(),
    ) -> None:
        self._operations.append(_Operation(buffers, emit, quantizable))
        self._references.extend(references)

    def _array(self, buffer: PlanBuffer) -> np.ndarray:
        """All rows that a placed buffer has room for, ``[max rows, width]``: a view."""
        shape = (self._num_bytes(buffer) // (buffer.stride * 4), buffer.stride)
        floats = (ctypes.c_float * (shape[0] * shape[1])).from_address(buffer.address)
        return np.ctypeslib.as_array(floats).reshape(shape)[:, : buffer.width]

    def _num_bytes(self, buffer: PlanBuffer) -> int:
        rows = (self._max_outputs if buffer.on_outputs else self._max_tokens) * buffer.rows_per_token
        if buffer.quantized:
            return native.quantized_bytes(rows, buffer.width)
        return rows * buffer.stride * 4

    def _place(self, operations: Sequence[_Operation], keep: Sequence[PlanBuffer]) -> np.ndarray:
        """Gives every buffer without an address one in a new arena: the lowest place that is free from its
        first to its last use."""
        first: dict[PlanBuffer, int] = {}
        last: dict[PlanBuffer, int] = {}
        for index, operation in enumerate(operations):
            for buffer in operation.buffers:
                if not buffer.address:
                    first.setdefault(buffer, index)
                    last[buffer] = index
        last.update((buffer, len(operations)) for buffer in keep)
        offsets: dict[PlanBuffer, int] = {}
        live: list[PlanBuffer] = []
        arena_bytes = 0
        for buffer, index in first.items():
            live = [other for other in live if last[other] >= index]
            offset, size = 0, self._num_bytes(buffer)
            for other in sorted(live, key=offsets.__getitem__):
                if offset + size <= offsets[other]:
                    break
                offset = max(offset, offsets[other] + self._num_bytes(other))
            offsets[buffer] = offset
            arena_bytes = max(arena_bytes, offset + size)
            live.append(buffer)
        arena = _aligned(arena_bytes)
        for buffer, offset in offsets.items():
            buffer.address = arena.ctypes.data + offset
        return arena
