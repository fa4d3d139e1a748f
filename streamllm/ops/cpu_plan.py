"""The CPU backend of the operations: a recorder of native plans.

Calls do not compute; they note operations over symbolic buffers (:mod:`streamllm.ops.plan_recorder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamllm.ops import Activation, Attention, Experts, Gate, LayerNorm, RMSNorm
from streamllm.ops.cpu_experts import PackedExperts, emit_experts, quantizable_buffers
from streamllm.ops.cpu_lora import AdapterSlots, CpuAdapters
from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.ops.plan_recorder import PlanBuffer, PlanRecorder, address_of, native, whole_groups
from streamllm.ops.step_inputs import MAX_LOGPROBS, SamplingBuffers, StepInputs
from streamllm.ops.stored_rows import StoredRows


@dataclass(frozen=True)
class PackedLinear:
    """A native weight, in whatever formats its rows were stored, and its bias (float32 ``[n]``), if any."""

    packed: Any
    bias: np.ndarray | None


@dataclass(frozen=True)
class AdaptedLinear(PackedLinear):
    """A native weight to which adapters add."""

    adapters: AdapterSlots


def _float32_rows(rows: np.ndarray) -> StoredRows:
    return StoredRows("float32", np.atleast_2d(np.ascontiguousarray(rows, np.float32)).view(np.uint8))


class CpuOps(PlanRecorder):
    """Records operations into native plans (the protocol :class:`streamllm.ops.Ops`).

    Args:
        threads: workers of the pool that runs the plans.
        max_tokens, max_outputs: rows that buffers have room for.
        lora: room for adapters.
    """

    packed_formats = frozenset(native.weight_formats())

    def __init__(self, *, threads: int, max_tokens: int, max_outputs: int, lora: LoraLimits | None = None):
        super().__init__(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs)
        self.weight_bytes = 0
        self.lora = lora
        self._adapters = None if lora is None else CpuAdapters(lora, threads)

    def matrix(
        self,
        rows: int,
        columns: int,
        parts: Iterable[np.ndarray | StoredRows],
        bias: np.ndarray | None = None,
    ) -> PackedLinear:
        packed = native.PackedMatrix(columns)
        for part in parts:
            stored = part if isinstance(part, StoredRows) else _float32_rows(part)
            data = np.ascontiguousarray(stored.data)
            count, row_bytes = data.shape
            if packed.n + count > rows or (stored is not part and row_bytes != columns * 4):
                raise ValueError(f"a part of shape {part.shape} does not fit a weight [{rows}, {columns}]")
            packed.append_rows(stored.format, data.ctypes.data, count, row_bytes, self.pool.num_threads)
        if packed.n != rows:
            raise ValueError(f"the parts of a weight [{rows}, {columns}] have {packed.n} rows")
        self.weight_bytes += packed.num_bytes
        return PackedLinear(packed, None if bias is None else self.vector(bias))

    def expert_matrices(
        self,
        rows: int,
        columns: int,
        experts: Iterable[Iterable[np.ndarray | StoredRows]],
        bias: np.ndarray | None = None,
    ) -> PackedExperts:
        packed = tuple(self.matrix(rows, columns, parts).packed for parts in experts)
        return PackedExperts(packed, None if bias is None else self.vector(bias))

    def vector(self, values: np.ndarray) -> np.ndarray:
        vector = np.array(values, np.float32)
        self.weight_bytes += vector.nbytes
        return vector

    def adapted(self, weight: PackedLinear, name: str, parts: Sequence[int]) -> AdaptedLinear:
        assert self._adapters is not None
        is_float32 = set(weight.packed.formats) == {"float32"}
        slots = self._adapters.add_matrix(name, parts, weight.packed.k, is_float32=is_float32)
        return AdaptedLinear(weight.packed, weight.bias, slots)

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        assert self._adapters is not None
        self._adapters.prepare(adapter)

    def load_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        assert self._adapters is not None
        self._adapters.load(slot, adapter)

    def assign_adapters(self, batch: StepInputs) -> None:
        """Takes the step's row table, before its forward is submitted."""
        if self._adapters is not None:
            self._adapters.assign(batch.lora_slots[: batch.num_tokens if batch.has_adapters else 0])

    def embedding(self, batch: StepInputs, weight: PackedLinear, first_row: int | None = None) -> PlanBuffer:
        return self._weight_rows(batch.token_ids, batch, weight, first_row or 0)

    def position_embedding(self, batch: StepInputs, weight: PackedLinear) -> PlanBuffer:
        return self._weight_rows(batch.rope_rows, batch, weight)

    def rms_norm(
        self, x: PlanBuffer, norm: RMSNorm, residual: PlanBuffer | None = None
    ) -> tuple[PlanBuffer, PlanBuffer]:
        return self._norm(x, norm, residual)

    def layer_norm(
        self, x: PlanBuffer, norm: LayerNorm, residual: PlanBuffer | None = None
    ) -> tuple[PlanBuffer, PlanBuffer]:
        return self._norm(x, norm, residual)

    def add(self, x: PlanBuffer, other: PlanBuffer) -> PlanBuffer:
        self._record(
            (x, other),
            lambda plan: plan.add(
                x.address, x.stride, other.address, other.stride, x.width, on_outputs=x.on_outputs
            ),
        )
        return other

    def scale(self, x: PlanBuffer, factor: float) -> PlanBuffer:
        self._record(
            (x,), lambda plan: plan.scale(x.address, x.stride, x.width, factor, on_outputs=x.on_outputs)
        )
        return x

    def soft_cap(self, x: PlanBuffer, cap: float) -> PlanBuffer:
        self._record(
            (x,), lambda plan: plan.soft_cap(x.address, x.stride, x.width, cap, on_outputs=x.on_outputs)
        )
        return x

    def sigmoid_scale(self, x: PlanBuffer, gate: PlanBuffer) -> PlanBuffer:
        self._record(
            (x, gate),
            lambda plan: plan.sigmoid_scale(
                x.address, x.stride, x.width, gate.address, gate.stride, on_outputs=x.on_outputs
            ),
        )
        return x

    def linear(self, x: PlanBuffer, weight: PackedLinear) -> PlanBuffer:
        out = self.new_buffer(weight.packed.n, on_outputs=x.on_outputs)
        self._record(
            (x, out),
            lambda plan: plan.linear(
                x.address,
                x.stride,
                weight.packed,
                address_of(weight.bias),
                out.address,
                out.stride,
                x.on_outputs,
                x.quantized,
            ),
            weight,
            quantizable=frozenset([x]) if weight.packed.is_quantized else frozenset(),
        )
        return self.lora_add(out, x, weight) if isinstance(weight, AdaptedLinear) else out

    def lora_add(self, out: PlanBuffer, x: PlanBuffer, weight: AdaptedLinear) -> PlanBuffer:
        assert self._adapters is not None
        rows = self._adapters.rows
        self._record(
            (x, out),
            lambda plan: plan.lora_add(
                x.address, x.stride, x.quantized, weight.adapters.native, rows, out.address, out.stride
            ),
            weight,
            quantizable=frozenset([x]) if weight.packed.is_quantized else frozenset(),
        )
        return out

    def rotary_and_cache(self, qkv: PlanBuffer, batch: StepInputs, attention: Attention) -> PlanBuffer:
        q_norm, k_norm = attention.q_norm, attention.k_norm
        norm = q_norm or k_norm
        rotates = attention.rotary_dim > 0
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
                address_of(q_norm.weight) if q_norm else 0,
                q_norm.size if q_norm else 0,
                address_of(k_norm.weight) if k_norm else 0,
                k_norm.size if k_norm else 0,
                norm.eps if norm else 0.0,
                address_of(batch.rope_cos[attention.rope]) if rotates else 0,
                address_of(batch.rope_sin[attention.rope]) if rotates else 0,
                address_of(batch.rope_rows),
                address_of(batch.slot_mapping[attention.group]),
                address_of(keys),
                address_of(values),
                batch.kv_cache.dtype_name,
                batch.kv_cache.block_size,
            ),
            batch,
            attention,
        )
        return qkv

    def paged_attention(self, q: PlanBuffer, batch: StepInputs, attention: Attention) -> PlanBuffer:
        out = self.new_buffer(attention.q_width)
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
                address_of(attention.sinks),
                address_of(batch.query_start),
                address_of(batch.context_lens),
                address_of(batch.block_tables[attention.group]),
                address_of(keys),
                address_of(values),
                batch.kv_cache.dtype_name,
                batch.kv_cache.block_size,
                out.quantized,
            ),
            batch,
            attention,
            quantizable=whole_groups(out, attention.head_dim),
        )
        return out

    def activate(self, x: PlanBuffer, activation: Activation) -> PlanBuffer:
        out = self.new_buffer(x.width, on_outputs=x.on_outputs)
        self._record(
            (x, out),
            lambda plan: plan.activate(
                x.address, x.stride, x.width, activation, out.address, out.stride, out.quantized, x.on_outputs
            ),
            quantizable=whole_groups(out, out.width),
        )
        return out

    def gate_and_mul(self, x: PlanBuffer, gate: Gate) -> PlanBuffer:
        out = self.new_buffer(x.width // 2, on_outputs=x.on_outputs)
        self._record(
            (x, out),
            lambda plan: plan.gate_and_mul(
                x.address,
                x.stride,
                out.width,
                gate.activation,
                gate.limit,
                out.address,
                out.stride,
                out.quantized,
                x.on_outputs,
            ),
            quantizable=whole_groups(out, out.width),
        )
        return out

    def experts(self, x: PlanBuffer, router_logits: PlanBuffer, experts: Experts) -> PlanBuffer:
        width = experts.down.packed[0].k
        active = self.new_buffer(width, on_outputs=x.on_outputs, rows_per_token=experts.top_k)
        out = self.new_buffer(x.width, on_outputs=x.on_outputs)
        self._record(
            (x, router_logits, active, out),
            lambda plan: emit_experts(plan, experts, x, router_logits, active, out),
            experts,
            quantizable=quantizable_buffers(experts, x, active),
        )
        return out

    def select_rows(self, x: PlanBuffer, batch: StepInputs) -> PlanBuffer:
        out = self.new_buffer(x.width, on_outputs=True)
        self._record(
            (x, out),
            lambda plan: plan.gather_rows(
                x.address, x.stride, address_of(batch.output_rows), x.width, out.address, out.stride
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
                address_of(sampling.temperature),
                address_of(sampling.top_k),
                address_of(sampling.top_p),
                address_of(sampling.min_p),
                address_of(sampling.seed),
                address_of(sampling.choice),
                address_of(sampling.position),
                address_of(sampling.num_logprobs),
                address_of(sampling.logprobs_mode),
                address_of(sampling.edits),
                address_of(sampling.allowed_mask),
                address_of(sampling.grammar_mask),
                address_of(sampling.replacement),
                address_of(sampling.target),
                address_of(sampling.token),
                address_of(sampling.logprob),
                address_of(sampling.rank),
                address_of(sampling.top_ids),
                address_of(sampling.top_logprobs),
                MAX_LOGPROBS,
            ),
            sampling,
        )

    def _weight_rows(
        self, indices: np.ndarray, batch: StepInputs, weight: PackedLinear, first_row: int = 0
    ) -> PlanBuffer:
        """The rows of a weight that an array of the batch names, one a token."""
        out = self.new_buffer(weight.packed.k)
        self._record(
            (out,),
            lambda plan: plan.embedding(
                address_of(indices), weight.packed, out.address, out.stride, first_row
            ),
            batch,
            weight,
        )
        return out

    def _norm(
        self, x: PlanBuffer, norm: RMSNorm | LayerNorm, residual: PlanBuffer | None
    ) -> tuple[PlanBuffer, PlanBuffer]:
        out = self.new_buffer(x.width, on_outputs=x.on_outputs)

        def emit(plan: Any) -> None:
            rows = (x.address, x.stride)
            added = (residual.address, residual.stride) if residual else (0, 0)
            written = (out.address, out.stride, out.quantized, x.on_outputs)
            weight = address_of(norm.weight)
            if isinstance(norm, LayerNorm):
                plan.layer_norm(*rows, *added, weight, address_of(norm.bias), norm.size, norm.eps, *written)
            else:
                plan.rms_norm(*rows, *added, weight, norm.size, norm.eps, *written)

        buffers = (x, out) if residual is None else (x, residual, out)
        self._record(buffers, emit, norm, quantizable=whole_groups(out, norm.size))
        return out, x if residual is None else residual
