"""The operations of :class:`streamllm.ops.Ops` on torch tensors of a device, over hand-written kernels.

Every operation is launched as a closure over tensors that were allocated before: a CUDA graph captures what
it launches, and a test can replay the closures instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from streamllm.errors import ModelLoadError
from streamllm.ops import Activation, Attention, Experts, Gate, LayerNorm, RMSNorm
from streamllm.ops.gpu import torch_operations
from streamllm.ops.gpu.adapters import AdaptedMatrix, DeviceAdapters
from streamllm.ops.gpu.device_inputs import DeviceBatch
from streamllm.ops.gpu.expert_weights import ExpertWeights, stack_experts
from streamllm.ops.gpu.kernels import AttentionShape, GpuKernels
from streamllm.ops.gpu.quantized_matrix import QuantizedMatrix
from streamllm.ops.gpu.weight_layout import PACKED_FORMATS
from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.ops.step_inputs import StepInputs
from streamllm.ops.stored_rows import StoredRows

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Activations, and the formats of weights that are taken as they are."""

Launch = Callable[[Callable[[], Any]], None]
"""Runs an operation, or notes it too."""


@dataclass(frozen=True)
class AttentionCall:
    """Attention of one layer from ``q`` to ``out``, ``[tokens, heads * head_dim]``."""

    out: Tensor
    q: Tensor
    attention: Attention


class DenseMatrix:
    """A weight as its elements.

    Attributes:
        weight, bias: ``[n, k]``, and ``[n]`` or ``None``, in the activations' dtype.
        shape: n and k.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self._transposed = weight.t()
        self._is_exact = weight.dtype == torch.float32 and weight.device.type == "cuda"

    def gather(self, out: Tensor, ids: Tensor) -> None:
        """``out = weight[ids]``."""
        torch.index_select(self.weight, 0, ids, out=out)

    def multiply(self, out: Tensor, x: Tensor) -> None:
        """``out = x @ weight.T + bias``; ``out`` may be float32 where ``x`` is not.

        In the exact mode (float32) a row's bits do not depend on the batch: cuBLAS picks its order of sums by
        the batch's size.
        """
        if self._is_exact:
            from streamllm.ops.gpu.triton_kernels.matmul import batch_invariant_linear

            batch_invariant_linear(out, x, self.weight, self.bias)
        elif out.dtype != x.dtype:
            _multiply_wide(out, x, self._transposed)
            if self.bias is not None:
                out += self.bias
        elif self.bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self.bias, x, self._transposed, out=out)


class WeightMatrix(Protocol):
    """What a product with a weight needs: dense, or quantised."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows ``n`` and columns ``k``."""

    def gather(self, out: Tensor, ids: Tensor) -> None: ...

    def multiply(self, out: Tensor, x: Tensor) -> None: ...


class GpuOps:
    """Operations on one device (the protocol :class:`streamllm.ops.Ops`).

    A batch is a :class:`DeviceBatch`.

    Args:
        kernels: what neither is a product with one matrix nor is put together from torch's operations.
        device: where weights and activations lie.
        dtype: of the activations; float32 is the exact mode.
        lora: room for adapters.

    Attributes:
        adapter_slots: int32 ``[max_tokens]`` on the device: each row's adapter; set before the first product.
        has_adapters: whether products have what adapters add: false for steps in which no row has one.
        launch: runs each operation.
        split: takes each layer's attention instead of its being computed (the pieces of a graph).
    """

    packed_formats: frozenset[str] = frozenset(DTYPES) | PACKED_FORMATS

    def __init__(
        self,
        kernels: GpuKernels,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraLimits | None = None,
    ):
        self.kernels = kernels
        self.device = device
        self.dtype = dtype
        self.weight_bytes = 0
        self.lora = lora
        self.adapter_slots: Tensor | None = None
        self.has_adapters = False
        self._adapters = None if lora is None else DeviceAdapters(lora, device, dtype)
        self.launch: Launch = _run
        self.split: Callable[[AttentionCall], None] | None = None
        self._product_dtype = dtype
        self._no_rope = torch.empty(1, 0, device=device)

    def with_float32_products(self) -> GpuOps:
        """The same operations, but products come out in float32: for logits."""
        ops = GpuOps(self.kernels, self.device, self.dtype)
        ops._product_dtype = torch.float32
        return ops

    # -- weights -------------------------------------------------------------------------------------------

    def matrix(
        self,
        rows: int,
        columns: int,
        parts: Iterable[np.ndarray | StoredRows],
        bias: np.ndarray | None = None,
    ) -> WeightMatrix:
        parts = list(parts)
        bias_vector = None if bias is None else torch.tensor(bias, dtype=torch.float32, device=self.device)
        if any(isinstance(part, StoredRows) and part.format in PACKED_FORMATS for part in parts):
            with self._in_memory():
                matrix = QuantizedMatrix.from_parts(
                    rows, columns, parts, self.device, self.dtype, bias_vector
                )
            self.weight_bytes += matrix.nbytes
            return matrix
        with self._in_memory():
            weight = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        first_row = 0
        for part in parts:
            values = _dense_rows(part)
            weight[first_row : first_row + len(values)] = values.to(self.device)
            first_row += len(values)
        if first_row != rows:
            raise ValueError(f"the parts of a weight [{rows}, {columns}] have {first_row} rows")
        dense = DenseMatrix(weight, None if bias_vector is None else bias_vector.to(self.dtype))
        self.weight_bytes += weight.nbytes + (0 if dense.bias is None else dense.bias.nbytes)
        return dense

    def expert_matrices(
        self,
        rows: int,
        columns: int,
        experts: Iterable[Iterable[np.ndarray | StoredRows]],
        bias: np.ndarray | None = None,
    ) -> ExpertWeights:
        biases = None if bias is None else torch.tensor(bias, dtype=torch.float32, device=self.device)
        with self._in_memory():
            matrices = [
                QuantizedMatrix.from_parts(rows, columns, parts, self.device, self.dtype) for parts in experts
            ]
            weights = stack_experts(matrices, self.dtype, biases)
        self.weight_bytes += weights.nbytes
        return weights

    def vector(self, values: np.ndarray) -> Tensor:
        vector = torch.tensor(values, dtype=torch.float32, device=self.device)
        self.weight_bytes += vector.nbytes
        return vector

    def adapted(self, weight: WeightMatrix, name: str, parts: Sequence[int]) -> AdaptedMatrix:
        assert self._adapters is not None
        with self._in_memory():
            matrix = self._adapters.add_matrix(name, weight, parts)
        self.weight_bytes += matrix.stack.nbytes
        return matrix

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        assert self._adapters is not None
        self._adapters.prepare(adapter)

    def load_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        assert self._adapters is not None
        self._adapters.load(slot, adapter)

    def assign_adapters(self, batch: StepInputs) -> None:
        """Sends what was loaded and takes whether the step needs it, before its forward."""
        if self._adapters is not None:
            self._adapters.send_loads()
            self.has_adapters = batch.has_adapters

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        """Says in a line that a weight does not fit."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"Not enough memory on {self.device} for the model's weights: it is full after "
                f"{self.weight_bytes / 2**30:.2f} GiB of them. Take a smaller model, one with quantised "
                "weights, or a GPU with more memory."
            ) from error

    # -- operations ----------------------------------------------------------------------------------------

    def embedding(self, batch: DeviceBatch, weight: WeightMatrix, first_row: int | None = None) -> Tensor:
        out = self._new(batch.num_tokens, weight.shape[1])
        if first_row is None:
            self.launch(lambda: weight.gather(out, batch.token_ids))
        else:
            self.launch(lambda: _gather_present(out, weight, batch.token_ids - first_row))
        return out

    def position_embedding(self, batch: DeviceBatch, weight: WeightMatrix) -> Tensor:
        out = self._new(batch.num_tokens, weight.shape[1])
        self.launch(lambda: weight.gather(out, batch.rope_rows))
        return out

    def rms_norm(self, x: Tensor, norm: RMSNorm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        self.launch(lambda: self.kernels.rms_norm(out, x, norm.weight, norm.eps, residual))
        return out, x if residual is None else residual

    def layer_norm(self, x: Tensor, norm: LayerNorm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(x)
        self.launch(lambda: torch_operations.layer_norm(out, x, norm, residual))
        return out, x if residual is None else residual

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        self.launch(lambda: other.add_(x))
        return other

    def scale(self, x: Tensor, factor: float) -> Tensor:
        self.launch(lambda: x.mul_(factor))
        return x

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        self.launch(lambda: torch_operations.soft_cap(x, cap))
        return x

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> Tensor:
        self.launch(lambda: torch_operations.sigmoid_scale(x, gate))
        return x

    def linear(self, x: Tensor, weight: WeightMatrix) -> Tensor:
        out = self._new(x.shape[0], weight.shape[0], self._product_dtype)
        self.launch(lambda: weight.multiply(out, x))
        return self.lora_add(out, x, weight) if isinstance(weight, AdaptedMatrix) else out

    def lora_add(self, out: Tensor, x: Tensor, weight: AdaptedMatrix) -> Tensor:
        if self.has_adapters:
            assert self.adapter_slots is not None
            slots = self.adapter_slots[: len(x)]
            self.launch(lambda: self.kernels.lora_add(out, x, slots, weight.stack))
        return out

    def rotary_and_cache(self, qkv: Tensor, batch: DeviceBatch, attention: Attention) -> Tensor:
        group, shape = batch.groups[attention.group], attention_shape(attention)
        cache = batch.kv_cache.layer(attention.place)
        cos = sin = self._no_rope
        if attention.rotary_dim:
            cos, sin = batch.rope_cos[attention.rope], batch.rope_sin[attention.rope]
        norms = _head_norms(attention)
        if norms is None:
            k_end = attention.q_width + attention.num_kv_heads * attention.head_dim
            self._norm_in_place(qkv[:, : attention.q_width], attention.q_norm)
            self._norm_in_place(qkv[:, attention.q_width : k_end], attention.k_norm)
        self.launch(
            lambda: self.kernels.rotary_and_cache(
                qkv,
                cache,
                group.slot_mapping,
                batch.rope_rows,
                cos,
                sin,
                shape,
                attention.rotary_dim,
                norms,
            )
        )
        return qkv[:, : attention.q_width]

    def paged_attention(self, q: Tensor, batch: DeviceBatch, attention: Attention) -> Tensor:
        out = self._new(q.shape[0], attention.q_width)
        if self.split is None:
            self.launch(lambda: self.attend(AttentionCall(out, q, attention), batch))
        else:
            self.split(AttentionCall(out, q, attention))
        return out

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        out = torch.empty_like(x)
        self.launch(lambda: torch_operations.activate(out, x, activation))
        return out

    def gate_and_mul(self, x: Tensor, gate: Gate) -> Tensor:
        out = self._new(x.shape[0], x.shape[1] // 2)
        self.launch(lambda: self.kernels.act_and_mul(out, x, gate.activation, gate.limit))
        return out

    def experts(self, x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
        out = torch.empty_like(x)
        self.launch(lambda: self.kernels.experts(out, x, router_logits, experts))
        return out

    def select_rows(self, x: Tensor, batch: DeviceBatch) -> Tensor:
        out = self._new(len(batch.output_rows), x.shape[1])
        self.launch(lambda: torch.index_select(x, 0, batch.output_rows, out=out))
        return out

    def attend(self, call: AttentionCall, batch: DeviceBatch) -> None:
        """A layer's attention at once: sequences with one row each and those with more by a kernel each."""
        out, q, attention = call.out, call.q, call.attention
        group, shape = batch.groups[attention.group], attention_shape(attention)
        cache = batch.kv_cache.layer(attention.place)
        for work in group.decode_works:
            self.kernels.paged_decode(out, q, cache, group.context, work, shape)
        if len(batch.prefill_sequences):
            self.kernels.paged_prefill(
                out, q, cache, group.context, batch.prefill_sequences, batch.max_query_len, shape
            )

    def _norm_in_place(self, x: Tensor, norm: RMSNorm | None) -> None:
        """Norms rows of q or k: over each ``norm.size`` of their columns."""
        if norm is None:
            return
        for part in x.split(norm.size, dim=1):
            self.launch(functools.partial(self.kernels.rms_norm, part, part, norm.weight, norm.eps))

    def _new(self, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(rows, width, dtype=dtype or self.dtype, device=self.device)


def attention_shape(attention: Attention) -> AttentionShape:
    """What the kernels need to know of a layer's attention."""
    return AttentionShape(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=attention.window,
        soft_cap=attention.soft_cap,
        sinks=attention.sinks,
    )


def _head_norms(attention: Attention) -> tuple[Tensor, Tensor, float] | None:
    """Weights and eps of norms over each head of q and k, which the kernel that rotates them makes too."""
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is None or k_norm is None or q_norm.eps != k_norm.eps:
        return None
    if q_norm.size != attention.head_dim or k_norm.size != attention.head_dim:
        return None
    return q_norm.weight, k_norm.weight, q_norm.eps


def _gather_present(out: Tensor, weight: WeightMatrix, rows: Tensor) -> None:
    """``out = weight[rows]``, with zeros for rows that it does not have."""
    missing = (rows < 0) | (rows >= weight.shape[0])
    weight.gather(out, rows.masked_fill(missing, 0))
    out.masked_fill_(missing[:, None], 0.0)


def _run(operation: Callable[[], Any]) -> None:
    operation()


def _dense_rows(part: np.ndarray | StoredRows) -> Tensor:
    """A part of a weight as a tensor ``[rows, columns]`` in the dtype in which it is stored."""
    if not isinstance(part, StoredRows):
        return torch.tensor(part)
    if part.format not in DTYPES:
        raise ValueError(f"rows in the format {part.format} must be dequantised")
    return torch.tensor(part.data).view(DTYPES[part.format])


def _multiply_wide(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """``x @ weight`` of 16-bit operands, not rounded to 16 bits on its way to float32."""
    if x.device.type == "cuda":
        torch.mm(x, weight, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x.float(), weight.float(), out=out)
