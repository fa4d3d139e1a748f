"""The operations that every model is built of, and what they read.

A family's ``forward`` calls these operations over its weights and never looks inside a buffer. Run with
:class:`streamllm.ops.torch_ops.TorchOps` the calls compute at once on torch tensors (the reference), with
:class:`streamllm.ops.gpu.gpu_ops.GpuOps` on those of a GPU, where graphs capture them; run with
:class:`streamllm.ops.cpu_plan.CpuOps` they are recorded once and replayed natively at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from streamllm.ops.stored_rows import StoredRows

Batch = Any
"""What a forward reads of a step, as its backend holds it: a
:class:`~streamllm.ops.step_inputs.StepInputs`, or on a GPU a
:class:`~streamllm.ops.gpu.device_inputs.DeviceBatch`."""

Buffer = Any
"""Activations of one operation, ``[rows, width]``: a torch tensor, or a symbol in a recorded plan."""

Matrix = Any
"""A weight ``W [n, k]`` (with its bias ``[n]``, if any) as its backend holds it."""

Vector = Any
"""A float32 weight of one dimension as its backend holds it."""


@dataclass(frozen=True)
class RMSNorm:
    """Root-mean-square norm (Zhang & Sennrich 2019): ``x / sqrt(mean(x^2) + eps) * weight``."""

    weight: Vector
    size: int
    eps: float


@dataclass(frozen=True)
class Attention:
    """One layer's attention, as the operations need to know it.

    Attributes:
        group: the KV group whose block tables it reads.
        place: which of the cache's planes it owns: its number among the group's layers.
        num_heads, num_kv_heads: query heads and the fewer key/value heads that groups of them share.
        head_dim: width of a head.
        rotary_dim: leading dimensions of a head that are rotated; even.
        scale: factor of the scores before softmax.
        window: positions that a row sees, its own included; 0 for all before it.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 for none.
        q_norm, k_norm: norms over each head before the rotation, or ``None``.
    """

    group: int
    place: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim


class Ops(Protocol):
    """Weight factories and operations. All rows are independent of each other but for attention.

    Attributes:
        weight_bytes: memory of the weights made so far.
        packed_formats: formats of :class:`StoredRows` that a weight may have without being dequantised.
    """

    weight_bytes: int
    packed_formats: frozenset[str]

    def matrix(
        self,
        rows: int,
        columns: int,
        parts: Iterable[np.ndarray | StoredRows],
        bias: np.ndarray | None = None,
    ) -> Matrix:
        """A weight from parts, stacked to ``rows`` rows, taken one at a time.

        A part is float32 ``[*, columns]``, or rows in one of ``packed_formats``, which stay as they are.
        """

    def vector(self, values: np.ndarray) -> Vector:
        """A float32 weight of one dimension."""

    def embedding(self, batch: Batch, weight: Matrix) -> Buffer:
        """``weight[token_ids]``: ``[tokens, hidden]``."""

    def rms_norm(self, x: Buffer, norm: RMSNorm, residual: Buffer | None = None) -> tuple[Buffer, Buffer]:
        """The norm of ``x + residual``, and that sum (which takes over ``residual``'s memory)."""

    def linear(self, x: Buffer, weight: Matrix) -> Buffer:
        """``x @ W.T + bias``: ``[rows, n]``."""

    def rotary_and_cache(self, qkv: Buffer, batch: Batch, attention: Attention) -> Buffer:
        """Norms (if any) and rotates q and k of each row ``[q heads | k heads | v heads]``, writes k and v to
        their slots in the cache, and gives the queries."""

    def paged_attention(self, q: Buffer, batch: Batch, attention: Attention) -> Buffer:
        """Causal attention over each sequence's blocks, this step's keys included: ``[tokens, q_width]``."""

    def silu_and_mul(self, x: Buffer) -> Buffer:
        """``silu(gate) * up`` of rows ``[gate | up]``: half as wide."""

    def select_rows(self, x: Buffer, batch: Batch) -> Buffer:
        """``x[output_rows]``: ``[outputs, width]``."""
