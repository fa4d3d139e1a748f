"""The operations that every model is built of, and what they read.

A family's ``forward`` calls these operations over its weights and never looks inside a buffer. Run with
:class:`streamllm.ops.torch_ops.TorchOps` the calls compute at once on torch tensors (the reference), with
:class:`streamllm.ops.gpu.gpu_ops.GpuOps` on those of a GPU, where graphs capture them; run with
:class:`streamllm.ops.cpu_plan.CpuOps` they are recorded once and replayed natively at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.ops.stored_rows import StoredRows

Batch = Any
"""What a forward reads of a step, as its backend holds it: a
:class:`~streamllm.ops.step_inputs.StepInputs`, or on a GPU a
:class:`~streamllm.ops.gpu.device_inputs.DeviceBatch`."""

Buffer = Any
"""Activations of one operation, ``[rows, width]``: a torch tensor, or a symbol in a recorded plan."""

Matrix = Any
"""A weight ``W [n, k]`` (with its bias ``[n]``, if any) as its backend holds it."""

ExpertMatrices = Any
"""A weight ``W [n, k]`` (with its bias, if any) an expert, as the backend holds them."""

Vector = Any
"""A float32 weight of one dimension as its backend holds it."""


Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""``gelu`` is exact (erf), ``gelu_tanh`` its usual approximation (GPT-2's "gelu_new")."""


@dataclass(frozen=True)
class RMSNorm:
    """Root-mean-square norm (Zhang & Sennrich 2019): ``x / sqrt(mean(x^2) + eps) * weight``."""

    weight: Vector
    size: int
    eps: float


@dataclass(frozen=True)
class LayerNorm:
    """Layer norm (Ba et al. 2016): ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``."""

    weight: Vector
    bias: Vector
    size: int
    eps: float


@dataclass(frozen=True)
class Gate:
    """How an MLP joins the halves of its rows ``[gate | up]``: ``activation(gate) * up``.

    Attributes:
        limit: above 0 the join is gpt-oss's instead: with ``g = min(gate, limit)`` and ``u = up`` clamped to
            ``[-limit, limit]`` it is ``g * sigmoid(1.702 g) * (u + 1)``, whatever ``activation`` says.
    """

    activation: Activation = "silu"
    limit: float = 0.0


@dataclass(frozen=True)
class Experts:
    """The gated MLPs of a mixture-of-experts layer (Shazeer et al. 2017), of which a row uses a few.

    Attributes:
        gate_up: ``[2 * intermediate, hidden]`` an expert, gate rows first (:meth:`Ops.expert_matrices`).
        down: ``[hidden, intermediate]`` an expert.
        num_experts: how many there are.
        top_k: how many a row uses: those with the largest router logits, the lower number among equals.
        normalize: their weights are the softmax over the chosen logits alone, so that they sum to 1
            (Mixtral, gpt-oss, Qwen3-MoE); otherwise the softmax over all (Qwen2-MoE).
        gate: how the halves of a row are joined.
    """

    gate_up: ExpertMatrices
    down: ExpertMatrices
    num_experts: int
    top_k: int
    normalize: bool
    gate: Gate = Gate()


@dataclass(frozen=True)
class Attention:
    """One layer's attention, as the operations need to know it.

    Attributes:
        group: the KV group whose block tables it reads.
        place: which of the cache's planes it owns: its number among the group's layers.
        num_heads, num_kv_heads: query heads and the fewer key/value heads that groups of them share.
        head_dim: width of a head.
        rotary_dim: leading dimensions of a head that are rotated; even; 0 for none.
        rope: which of the model's rotary embeddings turns them.
        scale: factor of the scores before softmax.
        window: positions that a row sees, its own included; 0 for all before it.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 for none.
        q_norm, k_norm: norms before the rotation, or ``None``: over each head if their size is ``head_dim``,
            else over all heads together (their size is then the width of all q, or of all k).
        sinks: float32 ``[num_heads]``: a score that joins each head's softmax and has no value (gpt-oss; not
            scaled, not capped), or ``None``.
    """

    group: int
    place: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    window: int = 0
    rope: int = 0
    soft_cap: float = 0.0
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    sinks: Vector | None = None

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim


class Ops(Protocol):
    """Weight factories and operations. All rows are independent of each other but for attention.

    Attributes:
        weight_bytes: memory of the weights made so far.
        packed_formats: formats of :class:`StoredRows` that a weight may have without being dequantised.
        lora: how many adapters may be loaded, and how large; ``None``: there are none.
    """

    weight_bytes: int
    packed_formats: frozenset[str]
    lora: LoraLimits | None

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

    def expert_matrices(
        self,
        rows: int,
        columns: int,
        experts: Iterable[Iterable[np.ndarray | StoredRows]],
        bias: np.ndarray | None = None,
    ) -> ExpertMatrices:
        """A weight an expert, taken one after the other; each from parts, as :meth:`matrix` takes them.

        Args:
            bias: float32 ``[num_experts, rows]``.
        """

    def vector(self, values: np.ndarray) -> Vector:
        """A float32 weight of one dimension."""

    def adapted(self, weight: Matrix, name: str, parts: Sequence[int]) -> Matrix:
        """The matrix with room for what ``lora.max_loras`` adapters add to it; its products are on rows of
        tokens.

        Args:
            name: what adapters call it (the keys of ``LoraAdapter.updates``).
            parts: how many rows each of its parts has, in order. An update is of one whole part.
        """

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """Does ahead, on any thread, what :meth:`load_adapter` would have to do; may be left out."""

    def load_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        """Puts an adapter in the place of what the slot held, before the next forward; ``None`` empties it.

        Recorded plans and captured graphs stay as they are. No step in flight may have rows with this slot.
        """

    def embedding(self, batch: Batch, weight: Matrix, first_row: int | None = None) -> Buffer:
        """``weight[token_ids]``: ``[tokens, hidden]``.

        Args:
            first_row: the weight has rows of some tokens only, from this one on, and the others have zeros;
                ``None``: it has all.
        """

    def position_embedding(self, batch: Batch, weight: Matrix) -> Buffer:
        """``weight[position]`` of each token, for models that learn positions: ``[tokens, hidden]``."""

    def rms_norm(self, x: Buffer, norm: RMSNorm, residual: Buffer | None = None) -> tuple[Buffer, Buffer]:
        """The norm of ``x + residual``, and that sum (which takes over ``residual``'s memory; ``x`` itself
        without one)."""

    def layer_norm(self, x: Buffer, norm: LayerNorm, residual: Buffer | None = None) -> tuple[Buffer, Buffer]:
        """The same with a layer norm."""

    def add(self, x: Buffer, other: Buffer) -> Buffer:
        """``x + other``; the sum takes over ``other``'s memory."""

    def scale(self, x: Buffer, factor: float) -> Buffer:
        """``x * factor``, in place."""

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        """``cap * tanh(x / cap)``, in place."""

    def sigmoid_scale(self, x: Buffer, gate: Buffer) -> Buffer:
        """``x * sigmoid(gate)``, in place; ``gate [rows, 1]``."""

    def linear(self, x: Buffer, weight: Matrix) -> Buffer:
        """``x @ W.T + bias``: ``[rows, n]``; of an adapted matrix with what :meth:`lora_add` adds."""

    def lora_add(self, out: Buffer, x: Buffer, weight: Matrix) -> Buffer:
        """``out`` plus, in each row that has an adapter, ``b @ (a @ x)`` of that adapter's updates of an
        adapted ``weight``; in place.

        Which adapter a row has is said once a step, for all matrices: ``StepInputs.lora_slots``. A row's
        result does not depend on the others.
        """

    def rotary_and_cache(self, qkv: Buffer, batch: Batch, attention: Attention) -> Buffer:
        """Norms (if any) and rotates q and k of each row ``[q heads | k heads | v heads]``, writes k and v to
        their slots in the cache, and gives the queries."""

    def paged_attention(self, q: Buffer, batch: Batch, attention: Attention) -> Buffer:
        """Causal attention over each sequence's blocks, this step's keys included: ``[tokens, q_width]``."""

    def activate(self, x: Buffer, activation: Activation) -> Buffer:
        """The activation of every element."""

    def gate_and_mul(self, x: Buffer, gate: Gate) -> Buffer:
        """The halves of rows ``[gate | up]`` joined: half as wide."""

    def experts(self, x: Buffer, router_logits: Buffer, experts: Experts) -> Buffer:
        """The weighted sum of each row's experts: ``[tokens, hidden]``.

        A row's result depends on nothing but the row; its experts are added in order of their numbers.

        Args:
            router_logits: ``[tokens, num_experts]``.
        """

    def select_rows(self, x: Buffer, batch: Batch) -> Buffer:
        """``x[output_rows]``: ``[outputs, width]``."""
