"""Dividing a model: from its config and its stored formats to what each rank has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamllm.errors import ConfigError
from streamllm.models.forward_trace import Parts, TracedExperts, TracedMatrix, TracedVector, trace_forward
from streamllm.models.model_config import ModelConfig
from streamllm.models.sharding import MatrixShard, Ranges, ShardingPlan, TensorShard
from streamllm.models.stored_columns import block_columns
from streamllm.models.tensor_splits import AttentionSplit, InnerSplit, NotDivisible, find_splits


@dataclass(frozen=True)
class HeadShard:
    """A rank's heads: of the queries, and of keys and values."""

    query: range
    kv: range


def make_sharding_plan(
    config: ModelConfig, format_of: Callable[[str], str], *, rank: int, size: int
) -> ShardingPlan:
    """
    Args:
        config: of the whole model.
        format_of: how a tensor of it is stored (:meth:`streamllm.models.checkpoint.Checkpoint.format`).

    Raises:
        ConfigError: one line that says why the model cannot be divided among so many.
    """
    if config.through_transformers:
        raise ConfigError(
            f"--tensor-parallel-size {size} does not go with {config.architecture}, which runs through "
            "Transformers; leave it out."
        )
    if config.vocab_size < size:
        raise ConfigError(
            f"--tensor-parallel-size {size} is more than the vocabulary of {config.vocab_size}."
        )
    heads = divide_heads(config.num_heads, config.num_kv_heads, size)
    vocabulary = divide(config.vocab_size, size)
    plan = ShardingPlan(rank, size, len(heads[rank].query), len(heads[rank].kv), vocabulary)
    if size == 1:
        return plan
    try:
        splits = find_splits(trace_forward(config))
    except NotDivisible as error:
        raise ConfigError(
            f"--tensor-parallel-size {size} does not go with {config.architecture}: {error}. Give each rank "
            f"some of its layers instead: --pipeline-parallel-size {size}."
        ) from error
    divider = _Divider(plan, format_of)
    for attention in splits.attentions:
        divider.divide_attention(attention, heads)
    for inner in splits.inners:
        divider.divide_inner(inner)
    for matrix in splits.vocabulary:
        divider.take_rows(matrix, (vocabulary[rank],))
    return plan


def divide(total: int, size: int, unit: int = 1) -> Ranges:
    """``total`` columns or rows cut into ``size`` ranges at multiples of ``unit``, as even as that allows,
    the larger ones first."""
    units, more = divmod(-(-total // unit), size)
    borders = [min((units * rank + min(rank, more)) * unit, total) for rank in range(size + 1)]
    return tuple(map(range, borders, borders[1:]))


def divide_heads(num_heads: int, num_kv_heads: int, size: int) -> list[HeadShard]:
    """Each rank's heads. Where there are fewer key/value heads than ranks, several have the same one, and
    different ones of its query heads.

    Raises:
        ConfigError: that cannot be.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        return [HeadShard(range(kv.start * group, kv.stop * group), kv) for kv in divide(num_kv_heads, size)]
    copies = size // num_kv_heads
    if size % num_kv_heads or group % copies:
        raise ConfigError(
            f"--tensor-parallel-size {size} does not divide the model's {num_heads} query heads, of which "
            f"each {group} share one of {num_kv_heads} key/value heads; take at most {num_kv_heads}, or a "
            f"multiple of it that divides {num_heads}."
        )
    share = group // copies
    return [
        HeadShard(range(rank * share, (rank + 1) * share), range(rank // copies, rank // copies + 1))
        for rank in range(size)
    ]


class _Divider:
    """Enters into a plan what its rank has of the matrices that are divided."""

    def __init__(self, plan: ShardingPlan, format_of: Callable[[str], str]):
        self._plan = plan
        self._format_of = format_of

    def divide_attention(self, split: AttentionSplit, heads: Sequence[HeadShard]) -> None:
        attention, rank = split.attention, self._plan.rank
        dim = attention.head_dim
        k_start, v_start = attention.num_heads, attention.num_heads + attention.num_kv_heads
        query, kv = heads[rank].query, heads[rank].kv
        rows = [query, _moved(kv, k_start), _moved(kv, v_start)]
        self.take_rows(split.qkv, tuple(range(part.start * dim, part.stop * dim) for part in rows))
        block = self._block(split.out)
        is_cut = any(shard.query.start * dim % block for shard in heads)
        self._take_columns(split.out, range(query.start * dim, query.stop * dim), dequantised=is_cut)
        if isinstance(attention.sinks, TracedVector):
            self._plan.tensors[attention.sinks.name] = TensorShard(rows=(query,))

    def divide_inner(self, split: InnerSplit) -> None:
        width, size = split.width, self._plan.size
        if width < size:
            raise ConfigError(
                f"--tensor-parallel-size {size} is more than the {width} columns of {split.second.name}."
            )
        block = self._block(split.second)
        is_cut = -(-width // block) < size
        part = divide(width, size, 1 if is_cut else block)[self._plan.rank]
        self.take_rows(split.first, tuple(_moved(part, start) for start in range(0, split.first.rows, width)))
        self._take_columns(split.second, part, dequantised=is_cut)

    def take_rows(self, matrix: TracedMatrix | TracedExperts, rows: Ranges) -> None:
        """
        Args:
            rows: of the matrix, or each expert's, as a whole.
        """
        experts = _experts(matrix)
        by_part = _rows_by_part(experts[0], rows)
        self._plan.matrices[matrix.name] = MatrixShard(_part_rows(experts[0]), rows=by_part)
        for parts in experts:
            for (name, _), own in zip(parts, by_part, strict=True):
                self._plan.tensors[f"{name}.weight"] = TensorShard(rows=own)
                if matrix.bias:
                    self._plan.tensors[f"{name}.bias"] = TensorShard(rows=own)

    def _take_columns(
        self, matrix: TracedMatrix | TracedExperts, columns: range, *, dequantised: bool
    ) -> None:
        self._plan.matrices[matrix.name] = MatrixShard(_part_rows(_experts(matrix)[0]), columns=columns)
        for name in matrix.names:
            self._plan.tensors[f"{name}.weight"] = TensorShard(columns=columns, dequantised=dequantised)
            if matrix.bias and self._plan.rank > 0:
                self._plan.tensors[f"{name}.bias"] = TensorShard(rows=())

    def _block(self, matrix: TracedMatrix | TracedExperts) -> int:
        """Columns that must stay together in each of the matrix's tensors."""
        names = [f"{name}.weight" for name in matrix.names]
        return math.lcm(*(block_columns(self._format_of(name), name) for name in names))


def _experts(matrix: TracedMatrix | TracedExperts) -> tuple[Parts, ...]:
    return matrix.experts if isinstance(matrix, TracedExperts) else (matrix.parts,)


def _part_rows(parts: Parts) -> tuple[int, ...]:
    return tuple(rows for _, rows in parts)


def _moved(part: range, distance: int) -> range:
    return range(part.start + distance, part.stop + distance)


def _rows_by_part(parts: Parts, rows: Ranges) -> tuple[Ranges, ...]:
    """Rows of a matrix as rows of each of the parts that it is stacked of."""
    found, start = [], 0
    for _, count in parts:
        own = [range(max(r.start - start, 0), min(r.stop - start, count)) for r in rows]
        found.append(tuple(r for r in own if r))
        start += count
    return tuple(found)
