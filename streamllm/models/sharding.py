"""Which part of every weight a rank of tensor parallelism has.

A :class:`ShardingPlan` says it by the names of matrices and tensors. It follows from the model's config and
from how its matrices are stored, so that every rank makes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from streamllm.models.lora_targets import AdaptableMatrix
from streamllm.models.model_config import ModelConfig
from streamllm.ops.lora import LoraAdapter, LoraUpdate

C = TypeVar("C", bound=ModelConfig)

Ranges = tuple[range, ...]
"""Runs of consecutive rows, in order."""


@dataclass(frozen=True)
class TensorShard:
    """A rank's part of one tensor.

    Attributes:
        rows: those it has (of a vector, elements); ``None``: all.
        columns: those it has; ``None``: all.
        dequantised: some rank's columns begin or end inside of stored blocks, so that all have float32.
    """

    rows: Ranges | None = None
    columns: range | None = None
    dequantised: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, where ``whole`` is the tensor's."""
        rows = whole[:1] if self.rows is None else (count(self.rows),)
        return (*rows, *(whole[1:] if self.columns is None else (len(self.columns),)))


@dataclass(frozen=True)
class MatrixShard:
    """A rank's part of one matrix, or of each of several experts'.

    Attributes:
        part_rows: how many rows each of its parts has in all.
        rows: of each part those that the rank has; ``None``: all.
        columns: those that the rank has, products being sums over the ranks; ``None``: all.
    """

    part_rows: tuple[int, ...]
    rows: tuple[Ranges, ...] | None = None
    columns: range | None = None

    @property
    def is_sum(self) -> bool:
        return self.columns is not None

    def local_parts(self, parts: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """The matrix's parts with as many rows as the rank has of them."""
        if self.rows is None:
            return list(parts)
        return [(name, count(rows)) for (name, _), rows in zip(parts, self.rows, strict=True)]

    def local_columns(self, columns: int) -> int:
        return columns if self.columns is None else len(self.columns)

    def shard_update(self, update: LoraUpdate) -> LoraUpdate:
        """What a rank adds to its part: with columns cut, a summand of what all of them add."""
        if self.columns is not None:
            a = np.ascontiguousarray(update.a[:, self.columns.start : self.columns.stop])
            return replace(update, a=a)
        if self.rows is None:
            return update
        part = np.cumsum([0, *self.part_rows]).tolist().index(update.first_row)
        first_row = sum(map(count, self.rows[:part]))
        b = np.concatenate([update.b[rows.start : rows.stop] for rows in self.rows[part]])
        return LoraUpdate(first_row, update.a, b)


@dataclass
class ShardingPlan:
    """What one rank has. What is not listed here it has whole.

    Attributes:
        rank, size: its number, and how many ranks there are.
        num_heads, num_kv_heads: those of its attention.
        vocabulary: of which tokens each rank has the embeddings and computes the logits.
        matrices: by the name of a matrix's first part; of experts, of the first expert's.
        tensors: by their whole names. The bias of a product that is a sum is rank 0's alone; what others have
            of it has no elements.
    """

    rank: int
    size: int
    num_heads: int
    num_kv_heads: int
    vocabulary: Ranges
    matrices: dict[str, MatrixShard] = field(default_factory=dict)
    tensors: dict[str, TensorShard] = field(default_factory=dict)

    def local_config(self, config: C) -> C:
        """The config of a model with this rank's heads: what its KV cache is made for."""
        return replace(config, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)

    def local_matrix(self, matrix: AdaptableMatrix) -> AdaptableMatrix:
        """A matrix as the rank has it."""
        shard = self.matrices.get(matrix.name)
        if shard is None:
            return matrix
        parts, columns = shard.local_parts(matrix.parts), shard.local_columns(matrix.columns)
        return AdaptableMatrix(matrix.name, tuple(parts), columns)

    def shard_adapter(self, adapter: LoraAdapter) -> LoraAdapter:
        """The rank's part of an adapter of the whole model: rows of ``b``, or columns of ``a``. ``content``
        is still that of the whole."""
        updates = {
            name: tuple(self.matrices[name].shard_update(update) for update in found)
            if name in self.matrices
            else found
            for name, found in adapter.updates.items()
        }
        return replace(adapter, updates=updates)


def count(ranges: Ranges) -> int:
    """Rows in all of them."""
    return sum(map(len, ranges))
