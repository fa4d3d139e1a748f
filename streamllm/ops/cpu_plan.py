"""The CPU backend of the operations: a recorder of native plans.

Calls do not compute. They note operations over symbolic buffers; :meth:`CpuOps.compile` then knows when each
buffer is used for the last time, places them in one arena where dead ones are reused, and emits a native plan
that is replayed with a single call a step, without the interpreter lock. What only products with quantised
weights read is written quantised to begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamllm.errors import ModelLoadError
from streamllm.ops import Attention, RMSNorm
from streamllm.ops.step_inputs import MAX_LOGPROBS, SamplingBuffers, StepInputs
from streamllm.ops.stored_rows import StoredRows

try:
    import streamllm._native as _native
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
    """

    on_outputs: bool
    width: int
    stride: int
    address: int = 0
    quantized: bool = False


@dataclass(frozen=True)
class PackedLinear:
    """A native weight, in whatever formats its rows were stored, and its bias (float32 ``[n]``), if any."""

    packed: Any
    bias: np.ndarray | None


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


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def _float32_rows(rows: np.ndarray) -> StoredRows:
    return StoredRows("float32", np.atleast_2d(np.ascontiguousarray(rows, np.float32)).view(np.uint8))


def _aligned(num_bytes: int) -> np.ndarray:
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def _whole_groups(out: PlanBuffer, width: int) -> frozenset[PlanBuffer]:
    """``out`` if it can be written quantised, ``width`` elements at a time, for all tokens."""
    return frozenset() if out.on_outputs or width % _native.GROUP else frozenset([out])


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


class CpuOps:
    """Records operations into native plans (the protocol :class:`streamllm.ops.Ops`).

    Args:
        threads: workers of the pool that runs the plans.
        max_tokens, max_outputs: rows that buffers have room for.
    """

    packed_formats = frozenset(_native.weight_formats())

    def __init__(self, *, threads: int, max_tokens: int, max_outputs: int):
        self.pool = _native.ThreadPool(threads)
        self.weight_bytes = 0
        self._max_tokens = max_tokens
        self._max_outputs = max_outputs
        self._operations: list[_Operation] = []
        self._references: list[Any] = []

    def matrix(
        self,
        rows: int,
        columns: int,
        parts: Iterable[np.ndarray | StoredRows],
        bias: np.ndarray | None = None,
    ) -> PackedLinear:
        packed = _native.PackedMatrix(columns)
        for part in parts:
            stored = part if isinstance(part, StoredRows) else _float32_rows(part)
            data = np.ascontiguousarray(stored.data)
            if packed.n + data.shape[0] > rows or (stored is not part and data.shape[1] != columns * 4):
                raise ValueError(f"a part of shape {part.shape} does not fit a weight [{rows}, {columns}]")
            packed.append_rows(stored.format, data.ctypes.data, *data.shape)
        if packed.n != rows:
            raise ValueError(f"the parts of a weight [{rows}, {columns}] have {packed.n} rows")
        self.weight_bytes += packed.num_bytes
        return PackedLinear(packed, None if bias is None else self.vector(bias))

    def vector(self, values: np.ndarray) -> np.ndarray:
        vector = np.array(values, np.float32)
        self.weight_bytes += vector.nbytes
        return vector

    def embedding(self, batch: StepInputs, weight: PackedLinear) -> PlanBuffer:
        out = self._new(weight.packed.k)
        self._record(
            (out,),
            lambda plan: plan.embedding(_address(batch.token_ids), weight.packed, out.address, out.stride),
            batch,
            weight,
        )
        return out

    def rms_norm(
        self, x: PlanBuffer, norm: RMSNorm, residual: PlanBuffer | None = None
    ) -> tuple[PlanBuffer, PlanBuffer]:
        out = self._new(x.width, on_outputs=x.on_outputs)
        buffers = (x, out) if residual is None else (x, residual, out)
        self._record(
            buffers,
            lambda plan: plan.rms_norm(
                x.address,
                x.stride,
                residual.address if residual else 0,
                residual.stride if residual else 0,
                _address(norm.weight),
                norm.size,
                norm.eps,
                out.address,
                out.stride,
                out.quantized,
            ),
            norm,
            quantizable=_whole_groups(out, norm.size),
        )
        return out, x if residual is None else residual

    def linear(self, x: PlanBuffer, weight: PackedLinear) -> PlanBuffer:
        out = self._new(weight.packed.n, on_outputs=x.on_outputs)
        self._record(
            (x, out),
            lambda plan: plan.linear(
                x.address,
                x.stride,
                weight.packed,
                _address(weight.bias),
                out.address,
                out.stride,
                x.on_outputs,
                x.quantized,
            ),
            weight,
            quantizable=frozenset([x]) if weight.packed.is_quantized else frozenset(),
        )
        return out

    def rotary_and_cache(self, qkv: PlanBuffer, batch: StepInputs, attention: Attention) -> PlanBuffer:
        q_norm, k_norm = attention.q_norm, attention.k_norm
        norm = q_norm or k_norm
        keys, values = batch.kv_cache.planes[attention.place]
        self._record(
            (qkv,),
            lambda plan: plan.rotary_and_cache(
                qkv.address,
                qkv.stride,
                attention.num_heads,
                attention.num_kv_heads,
                attention.head_dim,
                attention.rotary_dim,
                _address(q_norm.weight) if q_norm else 0,
                _address(k_norm.weight) if k_norm else 0,
                norm.eps if norm else 0.0,
                _address(batch.rope_cos),
                _address(batch.rope_sin),
                _address(batch.rope_rows),
                _address(batch.slot_mapping[attention.group]),
                _address(keys),
                _address(values),
                batch.kv_cache.dtype_name,
                batch.kv_cache.block_size,
            ),
            batch,
            attention,
        )
        return qkv

    def paged_attention(self, q: PlanBuffer, batch: StepInputs, attention: Attention) -> PlanBuffer:
        out = self._new(attention.q_width)
        keys, values = batch.kv_cache.planes[attention.place]
        self._record(
            (q, out),
            lambda plan: plan.paged_attention(
                q.address,
                q.stride,
                out.address,
                out.stride,
                attention.num_heads,
                attention.num_kv_heads,
                attention.head_dim,
                attention.scale,
                attention.window,
                attention.soft_cap,
                _address(batch.query_start),
                _address(batch.context_lens),
                _address(batch.block_tables[attention.group]),
                _address(keys),
                _address(values),
                batch.kv_cache.dtype_name,
                batch.kv_cache.block_size,
                out.quantized,
            ),
            batch,
            quantizable=_whole_groups(out, attention.head_dim),
        )
        return out

    def silu_and_mul(self, x: PlanBuffer) -> PlanBuffer:
        out = self._new(x.width // 2)
        self._record(
            (x, out),
            lambda plan: plan.silu_and_mul(
                x.address, x.stride, out.width, out.address, out.stride, out.quantized
            ),
            quantizable=_whole_groups(out, out.width),
        )
        return out

    def select_rows(self, x: PlanBuffer, batch: StepInputs) -> PlanBuffer:
        out = self._new(x.width, on_outputs=True)
        self._record(
            (x, out),
            lambda plan: plan.gather_rows(
                x.address, x.stride, _address(batch.output_rows), x.width, out.address, out.stride
            ),
            batch,
        )
        return out

    def sample(self, logits: PlanBuffer, vocab_size: int, sampling: SamplingBuffers) -> None:
        """Draws one token a row among the first ``vocab_size`` ids (``runner.sampler`` has the semantics)."""
        self._record(
            (logits,),
            lambda plan: plan.sample(
                logits.address,
                logits.stride,
                vocab_size,
                _address(sampling.temperature),
                _address(sampling.top_k),
                _address(sampling.top_p),
                _address(sampling.min_p),
                _address(sampling.seed),
                _address(sampling.choice),
                _address(sampling.position),
                _address(sampling.num_logprobs),
                _address(sampling.logprobs_mode),
                _address(sampling.edits),
                _address(sampling.allowed_mask),
                _address(sampling.grammar_mask),
                _address(sampling.replacement),
                _address(sampling.target),
                _address(sampling.token),
                _address(sampling.logprob),
                _address(sampling.rank),
                _address(sampling.top_ids),
                _address(sampling.top_logprobs),
                MAX_LOGPROBS,
            ),
            sampling,
        )

    def compile(self, keep: Sequence[PlanBuffer] = ()) -> CompiledPlan:
        """Turns what was recorded since the last call into a plan.

        Args:
            keep: buffers that must still hold their values when the plan has run.
        """
        operations, self._operations = self._operations, []
        references, self._references = self._references, []
        _choose_quantized(operations, keep)
        arena = self._place(operations, keep)
        plan = _native.Plan(self.pool)
        for operation in operations:
            operation.emit(plan)
        return CompiledPlan(plan, arena, [self.pool, *references])

    def _new(self, width: int, *, on_outputs: bool = False) -> PlanBuffer:
        return PlanBuffer(on_outputs, width, row_stride(width))

    def _record(
        self,
        buffers: tuple[PlanBuffer, ...],
        emit: Callable[[Any], None],
        *references: object,
        quantizable: frozenset[PlanBuffer] = frozenset(),
    ) -> None:
        self._operations.append(_Operation(buffers, emit, quantizable))
        self._references.extend(references)

    def _num_bytes(self, buffer: PlanBuffer) -> int:
        rows = self._max_outputs if buffer.on_outputs else self._max_tokens
        if buffer.quantized:
            return _native.quantized_bytes(rows, buffer.width)
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
