"""A forward's operations on a rank's part of the weights, with the sums that make their results whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from streamllm.models.sharding import MatrixShard, ShardingPlan
from streamllm.models.weights import WeightLoader
from streamllm.ops import (
    Activation,
    Attention,
    Batch,
    Buffer,
    Experts,
    Gate,
    LayerNorm,
    Matrix,
    Ops,
    RMSNorm,
    Vector,
)
from streamllm.ops.collectives import BufferCollectives

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ShardedMatrix:
    """A rank's part of a matrix, or of each expert's.

    Attributes:
        matrix: the part, as the backend holds it.
        is_sum: its products are summands of the matrix's, one on each rank.
        first_row: which row of the matrix its first is, where its rows are consecutive.
    """

    matrix: Matrix
    is_sum: bool
    first_row: int


class ShardedLoader:
    """Loads a rank's parts of the matrices that are divided, and all else as it is (a
    :class:`~streamllm.models.weights.WeightLoader`).

    Args:
        loader: over the rank's :class:`~streamllm.models.sharded_checkpoint.ShardedCheckpoint`.
    """

    def __init__(self, loader: WeightLoader, plan: ShardingPlan) -> None:
        self._loader = loader
        self._plan = plan

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> Matrix:
        shard = self._plan.matrices.get(parts[0][0])
        if shard is None:
            return self._loader.linear(parts, columns, bias=bias)
        matrix = self._loader.linear(
            shard.local_parts(parts), shard.local_columns(columns), bias=bias and self._has_bias(shard)
        )
        return _sharded(matrix, shard)

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> Matrix:
        shard = self._plan.matrices.get(experts[0][0][0])
        if shard is None:
            return self._loader.experts(experts, columns, bias=bias)
        matrices = self._loader.experts(
            [shard.local_parts(parts) for parts in experts],
            shard.local_columns(columns),
            bias=bias and self._has_bias(shard),
        )
        return _sharded(matrices, shard)

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        return self._loader.rms_norm(name, size, eps, offset=offset)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        return self._loader.layer_norm(name, size, eps, affine=affine)

    def vector(self, name: str, size: int) -> Vector:
        shard = self._plan.tensors.get(name)
        return self._loader.vector(name, size if shard is None else shard.shape((size,))[0])

    def _has_bias(self, shard: MatrixShard) -> bool:
        """Of a sum the bias is a summand once."""
        return not shard.is_sum or self._plan.rank == 0


def _sharded(matrix: Matrix, shard: MatrixShard) -> ShardedMatrix:
    return ShardedMatrix(matrix, shard.is_sum, shard.rows[0][0].start if shard.rows else 0)


class LocalViews:
    """What a rank's operations read in the place of a model's attentions and experts; made once each."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._made: dict[int, tuple[object, Any]] = {}

    def attention(self, attention: Attention) -> Attention:
        """With the heads that the rank has. (Sinks were loaded so.)"""
        num_heads, num_kv_heads = self._plan.num_heads, self._plan.num_kv_heads
        return self._view(
            attention, lambda: replace(attention, num_heads=num_heads, num_kv_heads=num_kv_heads)
        )

    def experts(self, experts: Experts) -> Experts:
        """With the rank's matrices as its backend holds them."""
        return self._view(
            experts,
            lambda: replace(experts, gate_up=experts.gate_up.matrix, down=experts.down.matrix),
        )

    def _view(self, whole: T, make: Callable[[], T]) -> T:
        """Kept beside what it was made of, so that no other object can have its identity."""
        if id(whole) not in self._made:
            self._made[id(whole)] = (whole, make())
        view: T = self._made[id(whole)][1]
        return view


class ShardedOps:
    """Operations over a model that a :class:`ShardedLoader` loaded (those of :class:`streamllm.ops.Ops`
    without its weight factories). Buffers that are as wide as the whole model's hold the same on every rank;
    others hold what the rank computes of them.

    Args:
        collectives: of the ranks, over buffers of ``ops``.

    Attributes:
        ops: of the rank's backend.
    """

    def __init__(self, ops: Ops, collectives: BufferCollectives, views: LocalViews) -> None:
        self.ops = ops
        self._collectives = collectives
        self._views = views

    def embedding(self, batch: Batch, weight: ShardedMatrix) -> Buffer:
        rows = self.ops.embedding(batch, weight.matrix, first_row=weight.first_row)
        return self._collectives.all_reduce(rows)

    def linear(self, x: Buffer, weight: Matrix) -> Buffer:
        if not isinstance(weight, ShardedMatrix):
            return self.ops.linear(x, weight)
        out = self.ops.linear(x, weight.matrix)
        return self._collectives.all_reduce(out) if weight.is_sum else out

    def experts(self, x: Buffer, router_logits: Buffer, experts: Experts) -> Buffer:
        out = self.ops.experts(x, router_logits, self._views.experts(experts))
        return self._collectives.all_reduce(out)

    def rotary_and_cache(self, qkv: Buffer, batch: Batch, attention: Attention) -> Buffer:
        return self.ops.rotary_and_cache(qkv, batch, self._views.attention(attention))

    def paged_attention(self, q: Buffer, batch: Batch, attention: Attention) -> Buffer:
        return self.ops.paged_attention(q, batch, self._views.attention(attention))

    def position_embedding(self, batch: Batch, weight: Matrix) -> Buffer:
        return self.ops.position_embedding(batch, weight)

    def rms_norm(self, x: Buffer, norm: RMSNorm, residual: Buffer | None = None) -> tuple[Buffer, Buffer]:
        return self.ops.rms_norm(x, norm, residual)

    def layer_norm(self, x: Buffer, norm: LayerNorm, residual: Buffer | None = None) -> tuple[Buffer, Buffer]:
        return self.ops.layer_norm(x, norm, residual)

    def add(self, x: Buffer, other: Buffer) -> Buffer:
        return self.ops.add(x, other)

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return self.ops.scale(x, factor)

    def soft_cap(self, x: Buffer, cap: float) -> Buffer:
        return self.ops.soft_cap(x, cap)

    def sigmoid_scale(self, x: Buffer, gate: Buffer) -> Buffer:
        return self.ops.sigmoid_scale(x, gate)

    def activate(self, x: Buffer, activation: Activation) -> Buffer:
        return self.ops.activate(x, activation)

    def gate_and_mul(self, x: Buffer, gate: Gate) -> Buffer:
        return self.ops.gate_and_mul(x, gate)

    def select_rows(self, x: Buffer, batch: Batch) -> Buffer:
        return self.ops.select_rows(x, batch)
