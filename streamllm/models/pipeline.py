"""Which layers a stage of a pipeline has, and the forward as that stage runs it (pipeline parallelism).

Every stage goes through the whole forward of a family, which is the same program each time: it computes the
operations that are its own and skips the others. What crosses a border between two stages are the hidden
states (and their residuals) that one computes and a later one reads.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from streamllm.errors import ConfigError
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.forward_trace import ForwardTrace, trace_forward
from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import Family
from streamllm.models.sharded_ops import ShardedOps
from streamllm.models.tensor_shapes import expected_shapes
from streamllm.models.weights import WeightLoader
from streamllm.ops import (
    Activation,
    Attention,
    Batch,
    Buffer,
    ExpertMatrices,
    Experts,
    Gate,
    LayerNorm,
    Matrix,
    Ops,
    RMSNorm,
    Vector,
)
from streamllm.ops.collectives import BufferCollectives, Collectives, buffer_collectives
from streamllm.ops.lora import LoraAdapter
from streamllm.ops.stored_rows import StoredRows

C = TypeVar("C", bound=ModelConfig)


@dataclass(frozen=True)
class StagePlan:
    """What one stage has of a model.

    Attributes:
        stage: its number, from 0.
        layers: of each stage.
        first_calls: for each stage which operation of the forward is its first.
        names: of the weights that it reads, as loaders are asked for them.
        hidden_size: width of what crosses borders.
    """

    stage: int
    layers: tuple[range, ...]
    first_calls: tuple[int, ...]
    names: frozenset[str]
    hidden_size: int

    @property
    def is_last(self) -> bool:
        """Whether it computes the logits."""
        return self.stage == len(self.layers) - 1

    def stage_of(self, call: int) -> int:
        """Who computes an operation, by how many of the forward come before it."""
        return bisect.bisect_right(self.first_calls, call) - 1

    def has(self, tensor: str) -> bool:
        """Whether it reads a tensor, by its whole name."""
        return tensor in self.names or tensor.rpartition(".")[0] in self.names

    def local_config(self, config: C) -> C:
        """The config of a model whose other layers are elsewhere: for loading it, and for its KV cache."""
        return replace(config, own_layers=self.layers[self.stage])

    def stage_adapter(self, adapter: LoraAdapter) -> LoraAdapter:
        """What the stage needs of an adapter of the whole model. Its content is still that of the whole."""
        updates = {name: found for name, found in adapter.updates.items() if name in self.names}
        return replace(adapter, updates=updates)


def make_stage_plan(
    config: ModelConfig, num_bytes: Callable[[str], int], *, stage: int, num_stages: int
) -> StagePlan:
    """
    Args:
        config: of the whole model.
        num_bytes: of a tensor of it (:meth:`streamllm.models.checkpoint.Checkpoint.num_bytes`).

    Raises:
        ConfigError: one line that says why the model has not so many stages.
    """
    if config.through_transformers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} does not go with {config.architecture}, which runs "
            "through Transformers; leave it out."
        )
    if num_stages > config.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} is more than the model's {config.num_layers} layers."
        )
    trace = trace_forward(config)
    layers = divide_layers(*_bytes_by_place(config, trace, num_bytes), num_stages)
    first_calls = (0, *(trace.layer_starts[part.start] for part in layers[1:]))
    calls = trace.calls[first_calls[stage] : (*first_calls, None)[stage + 1]]
    if stage == num_stages - 1:
        calls += trace.head_calls
    names = {name for call in calls for weight in call.weights for name in weight.names}
    return StagePlan(stage, layers, first_calls, frozenset(names), config.hidden_size)


def divide_layers(before: int, layers: Sequence[int], behind: int, num_stages: int) -> tuple[range, ...]:
    """Consecutive layers for each stage, at least one, so that all have about as many bytes of weights.

    Args:
        before, layers, behind: bytes of what comes before the first layer, of each layer, and of what comes
            behind the last.
    """
    sums = list(itertools.accumulate(layers, initial=before))
    total = sums[-1] + behind
    borders = [0]
    for stage in range(1, num_stages):
        allowed = range(borders[-1] + 1, len(layers) - (num_stages - stage) + 1)
        borders.append(min(allowed, key=lambda border: abs(sums[border] * num_stages - total * stage)))
    borders.append(len(layers))
    return tuple(map(range, borders, borders[1:]))


def _bytes_by_place(
    config: ModelConfig, trace: ForwardTrace, num_bytes: Callable[[str], int]
) -> tuple[int, list[int], int]:
    """Bytes of weights before the first layer, of each, and behind the last."""
    sizes = {tensor: num_bytes(tensor) for tensor in expected_shapes(config)}

    def total(names: frozenset[str]) -> int:
        found = (tensor for tensor in sizes if tensor in names or tensor.rpartition(".")[0] in names)
        return sum(sizes[tensor] for tensor in found)

    layers = [total(trace.names_within(layer)) for layer in range(config.num_layers)]
    return total(trace.names_before), layers, total(trace.names_after)


class StageCheckpoint:
    """Those of a model's tensors that a stage reads (a :class:`~streamllm.models.checkpoint.Checkpoint`)."""

    def __init__(self, whole: Checkpoint, plan: StagePlan) -> None:
        self._whole = whole
        self._plan = plan

    def names(self) -> set[str]:
        return set(filter(self._plan.has, self._whole.names()))

    def has(self, name: str) -> bool:
        return self._plan.has(name) and self._whole.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(name)

    def format(self, name: str) -> str:
        return self._whole.format(name)

    def num_bytes(self, name: str) -> int:
        return self._whole.num_bytes(name)

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        return self._whole.read(name, rows)

    def read_stored(self, name: str, rows: slice | None = None) -> StoredRows:
        return self._whole.read_stored(name, rows)

    def release(self, name: str) -> None:
        self._whole.release(name)


@dataclass(frozen=True)
class _Absent:
    """Stands for a weight that another stage has; its operations are never called."""


_ABSENT: Any = _Absent()


class StageLoader:
    """Loads what a stage reads, and nothing of the others (a
    :class:`~streamllm.models.weights.WeightLoader`)."""

    def __init__(self, loader: WeightLoader, plan: StagePlan) -> None:
        self._loader = loader
        self._names = plan.names

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> Matrix:
        is_here = parts[0][0] in self._names
        return self._loader.linear(parts, columns, bias=bias) if is_here else _ABSENT

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> ExpertMatrices:
        is_here = experts[0][0][0] in self._names
        return self._loader.experts(experts, columns, bias=bias) if is_here else _ABSENT

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        if name in self._names:
            return self._loader.rms_norm(name, size, eps, offset=offset)
        return RMSNorm(_ABSENT, size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        if name in self._names:
            return self._loader.layer_norm(name, size, eps, affine=affine)
        return LayerNorm(_ABSENT, _ABSENT, size, eps)

    def vector(self, name: str, size: int) -> Vector:
        return self._loader.vector(name, size) if name in self._names else _ABSENT


class StageFamily:
    """A family as one stage runs it. To a backend it is a :class:`~streamllm.models.registry.Family`; the
    last stage's hidden states and logits are the model's, and the others have no logits.

    Args:
        family: of the whole model.
        plan: what the stage has of it.
        collectives: of the stages, by their numbers; all call ``forward`` in the same order, for the same
            rows.
    """

    def __init__(self, family: Family, plan: StagePlan, collectives: Collectives) -> None:
        self._family = family
        self._plan = plan
        self._collectives = collectives

    def load_weights(self, loader: WeightLoader, config: Any) -> Any:
        """The stage's part of the weights.

        Args:
            config: of :meth:`StagePlan.local_config`.
        """
        return self._family.load_weights(StageLoader(loader, self._plan), config)

    def forward(self, model: Any, ops: Ops, batch: Batch) -> Buffer:
        """The hidden states of the last operation here: ``[tokens, hidden_size]``."""
        backend = ops.ops if isinstance(ops, ShardedOps) else ops
        neighbours = buffer_collectives(backend, self._collectives)
        stage = StageOps(ops, self._plan, neighbours, batch)
        out = self._family.forward(model, cast(Ops, stage), batch)
        return stage.result(out)

    def logits(self, model: Any, ops: Ops, hidden: Buffer) -> Buffer:
        return self._family.logits(model, ops, hidden) if self._plan.is_last else None


@dataclass(eq=False, slots=True)
class _Value:
    """What one operation gives.

    Attributes:
        stage: who computes it.
        buffer: it, where it is here.
        sent: it is with the next stage already.
    """

    stage: int
    buffer: Buffer = None
    sent: bool = False


class StageOps:
    """The operations of one forward as a stage runs them (those of :class:`streamllm.ops.Ops` without its
    weight factories). Neighbours meet values in the same order, for both go through the same program; a value
    that is read further on is handed on.

    Args:
        ops: what computes the stage's own.
        neighbours: the stages, over buffers of the same backend.
        batch: of the forward.
    """

    def __init__(self, ops: Ops, plan: StagePlan, neighbours: BufferCollectives, batch: Batch) -> None:
        self._ops = ops
        self._plan = plan
        self._neighbours = neighbours
        self._batch = batch
        self._num_calls = 0
        self._last_sent: Buffer = None

    def result(self, out: _Value) -> Buffer:
        """The forward's result on the last stage; on the others what the next one works on with."""
        return out.buffer if self._plan.is_last else self._last_sent

    def embedding(self, batch: Batch, weight: Matrix) -> _Value:
        return self._value([], lambda: self._ops.embedding(batch, weight))

    def position_embedding(self, batch: Batch, weight: Matrix) -> _Value:
        return self._value([], lambda: self._ops.position_embedding(batch, weight))

    def rms_norm(self, x: _Value, norm: RMSNorm, residual: _Value | None = None) -> tuple[_Value, _Value]:
        return self._norm("rms_norm", x, norm, residual)

    def layer_norm(self, x: _Value, norm: LayerNorm, residual: _Value | None = None) -> tuple[_Value, _Value]:
        return self._norm("layer_norm", x, norm, residual)

    def add(self, x: _Value, other: _Value) -> _Value:
        return self._value([x, other], self._ops.add)

    def scale(self, x: _Value, factor: float) -> _Value:
        return self._value([x], lambda x: self._ops.scale(x, factor))

    def soft_cap(self, x: _Value, cap: float) -> _Value:
        return self._value([x], lambda x: self._ops.soft_cap(x, cap))

    def sigmoid_scale(self, x: _Value, gate: _Value) -> _Value:
        return self._value([x, gate], self._ops.sigmoid_scale)

    def linear(self, x: _Value, weight: Matrix) -> _Value:
        return self._value([x], lambda x: self._ops.linear(x, weight))

    def rotary_and_cache(self, qkv: _Value, batch: Batch, attention: Attention) -> _Value:
        return self._value([qkv], lambda qkv: self._ops.rotary_and_cache(qkv, batch, attention))

    def paged_attention(self, q: _Value, batch: Batch, attention: Attention) -> _Value:
        return self._value([q], lambda q: self._ops.paged_attention(q, batch, attention))

    def activate(self, x: _Value, activation: Activation) -> _Value:
        return self._value([x], lambda x: self._ops.activate(x, activation))

    def gate_and_mul(self, x: _Value, gate: Gate) -> _Value:
        return self._value([x], lambda x: self._ops.gate_and_mul(x, gate))

    def experts(self, x: _Value, router_logits: _Value, experts: Experts) -> _Value:
        return self._value(
            [x, router_logits], lambda x, router_logits: self._ops.experts(x, router_logits, experts)
        )

    def _norm(
        self,
        name: Literal["rms_norm", "layer_norm"],
        x: _Value,
        norm: RMSNorm | LayerNorm,
        residual: _Value | None,
    ) -> tuple[_Value, _Value]:
        inputs = [x] if residual is None else [x, residual]
        both = self._value(inputs, lambda x, residual=None: getattr(self._ops, name)(x, norm, residual))
        out, total = (None, None) if both.buffer is None else both.buffer
        return _Value(both.stage, out), x if residual is None else _Value(both.stage, total)

    def _value(self, inputs: Sequence[_Value], compute: Callable[..., Any]) -> _Value:
        """What the next operation gives, computed if it is the stage's own."""
        stage = self._plan.stage_of(self._num_calls)
        self._num_calls += 1
        if stage == self._plan.stage:
            return _Value(stage, compute(*map(self._here, inputs)))
        if stage > self._plan.stage:
            for value in inputs:
                self._hand_on(value)
        return _Value(stage)

    def _here(self, value: _Value) -> Buffer:
        """A value as this stage has it: received, if an earlier one computes it."""
        if value.buffer is None:
            value.buffer = self._neighbours.receive(self._plan.hidden_size, self._plan.stage - 1, self._batch)
        return value.buffer

    def _hand_on(self, value: _Value) -> None:
        """A later stage reads it, so that the next one gets it once."""
        if value.stage <= self._plan.stage and not value.sent:
            self._last_sent = self._here(value)
            self._neighbours.send(self._last_sent, self._plan.stage + 1)
            value.sent = True
