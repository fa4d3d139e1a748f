"""A model's forward as the list of its operations, found out by running it over nothing.

What a forward does with each of its weights, and where one layer ends and the next begins, no table has to
say: the family's ``load_weights`` is given placeholders, and its ``forward`` and ``logits`` operations that
note how they are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import family_of
from streamllm.ops import Activation, Attention, Experts, Gate, LayerNorm, Ops, RMSNorm

_LAYER = re.compile(r"\.(\d+)\.")

Parts = tuple[tuple[str, int], ...]
"""Layers that are stacked row-wise into one matrix: name and rows of each."""


@dataclass(frozen=True, eq=False)
class TracedMatrix:
    """A matrix that was asked for; the same object in all its uses.

    Attributes:
        parts, columns, bias: as :meth:`streamllm.models.weights.WeightLoader.linear` took them.
    """

    parts: Parts
    columns: int
    bias: bool

    @property
    def name(self) -> str:
        """Of its first part."""
        return self.parts[0][0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True, eq=False)
class TracedExperts:
    """A matrix an expert.

    Attributes:
        experts, columns, bias: as :meth:`streamllm.models.weights.WeightLoader.experts` took them.
    """

    experts: tuple[Parts, ...]
    columns: int
    bias: bool

    @property
    def name(self) -> str:
        """Of the first expert's first part."""
        return self.experts[0][0][0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for parts in self.experts for name, _ in parts)

    @property
    def rows(self) -> int:
        """Of one expert."""
        return sum(rows for _, rows in self.experts[0])


@dataclass(frozen=True, eq=False)
class TracedVector:
    """A vector by the name that the loader was asked for: of a norm's weights, that of the norm."""

    name: str
    size: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


TracedWeight = TracedMatrix | TracedExperts | TracedVector


@dataclass(frozen=True, eq=False)
class TracedBuffer:
    """What one call gave; another call gives another, even where the memory is the same.

    Attributes:
        maker: the call; ``None``: the hidden states that ``logits`` takes.
    """

    maker: TracedCall | None


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One operation.

    Attributes:
        operation: the name of the method of :class:`streamllm.ops.Ops`.
        inputs: the buffers that it takes, in order.
        weights: the weights that it reads.
        attention: of ``rotary_and_cache`` and ``paged_attention``.
        layer: the number of the layer whose weights it reads; ``None``: it reads none, or others.
    """

    operation: str
    inputs: tuple[TracedBuffer, ...] = field(default=(), repr=False)
    weights: tuple[TracedWeight, ...] = ()
    attention: Attention | None = None

    @property
    def layer(self) -> int | None:
        for name in _names(self.weights):
            if match := _LAYER.search(f"{name}."):
                return int(match[1])
        return None


@dataclass(frozen=True)
class ForwardTrace:
    """
    Attributes:
        calls: of ``forward``, in order.
        head_calls: of ``logits``.
        logits: what ``logits`` gave.
        layer_starts: for each layer how many of ``calls`` come before the first that reads its weights.
        layers_end: how many come before the first behind the last layer.
    """

    calls: tuple[TracedCall, ...]
    head_calls: tuple[TracedCall, ...]
    logits: TracedBuffer
    layer_starts: tuple[int, ...]
    layers_end: int

    @property
    def names_before(self) -> frozenset[str]:
        """What is read before the first layer. Names are those that loaders are asked for: of a tensor
        without ``.weight`` or ``.bias``, and of a lone vector its whole name."""
        return frozenset(_names_of(self.calls[: self.layer_starts[0]]))

    def names_within(self, layer: int) -> frozenset[str]:
        """What is read in a layer."""
        ends = (*self.layer_starts[1:], self.layers_end)
        return frozenset(_names_of(self.calls[self.layer_starts[layer] : ends[layer]]))

    @property
    def names_after(self) -> frozenset[str]:
        """What is read behind the last layer, for the logits too: with tied embeddings, that of the tokens
        again."""
        return frozenset(_names_of((*self.calls[self.layers_end :], *self.head_calls)))


def trace_forward(config: ModelConfig) -> ForwardTrace:
    """The operations of a model with this config (one of a family here, not Transformers' own code)."""
    family, ops = family_of(config.architecture), TracingOps()
    model = family.load_weights(_TracingLoader(), config)
    family.forward(model, cast(Ops, ops), None)
    calls = tuple(ops.calls)
    head = TracingOps()
    logits = family.logits(model, cast(Ops, head), TracedBuffer(None))
    starts, end = _layer_borders(calls, config.num_layers)
    return ForwardTrace(calls, tuple(head.calls), cast(TracedBuffer, logits), starts, end)


def _layer_borders(calls: Sequence[TracedCall], num_layers: int) -> tuple[tuple[int, ...], int]:
    """Where the layers start, and where the last one ends. A call without weights belongs to the layer of
    those before it."""
    layers = [call.layer for call in calls]
    starts = tuple(layers.index(layer) for layer in range(num_layers))
    behind = (
        index
        for index in range(starts[-1], len(calls))
        if layers[index] is None and any(_names(calls[index].weights))
    )
    return starts, next(behind, len(calls))


def _names(weights: Iterable[TracedWeight]) -> Iterable[str]:
    return (name for weight in weights for name in weight.names)


def _names_of(calls: Iterable[TracedCall]) -> Iterable[str]:
    return (name for call in calls for name in _names(call.weights))


class _TracingLoader:
    """Placeholders for weights (a :class:`streamllm.models.weights.WeightLoader`)."""

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> TracedMatrix:
        return TracedMatrix(tuple(parts), columns, bias)

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> TracedExperts:
        return TracedExperts(tuple(tuple(parts) for parts in experts), columns, bias)

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        return RMSNorm(TracedVector(name, size), size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        return LayerNorm(TracedVector(name, size), None, size, eps)

    def vector(self, name: str, size: int) -> TracedVector:
        return TracedVector(name, size)


@dataclass
class TracingOps:
    """Operations that compute nothing (those of :class:`streamllm.ops.Ops`, without its weight factories).

    Attributes:
        calls: so far.
    """

    calls: list[TracedCall] = field(default_factory=list)

    def embedding(self, batch: Any, weight: TracedMatrix) -> TracedBuffer:
        return self._note("embedding", weights=[weight])

    def position_embedding(self, batch: Any, weight: TracedMatrix) -> TracedBuffer:
        return self._note("position_embedding", weights=[weight])

    def rms_norm(
        self, x: TracedBuffer, norm: RMSNorm, residual: TracedBuffer | None = None
    ) -> tuple[TracedBuffer, TracedBuffer]:
        return self._norm("rms_norm", x, norm, residual)

    def layer_norm(
        self, x: TracedBuffer, norm: LayerNorm, residual: TracedBuffer | None = None
    ) -> tuple[TracedBuffer, TracedBuffer]:
        return self._norm("layer_norm", x, norm, residual)

    def add(self, x: TracedBuffer, other: TracedBuffer) -> TracedBuffer:
        return self._note("add", x, other)

    def scale(self, x: TracedBuffer, factor: float) -> TracedBuffer:
        return self._note("scale", x)

    def soft_cap(self, x: TracedBuffer, cap: float) -> TracedBuffer:
        return self._note("soft_cap", x)

    def sigmoid_scale(self, x: TracedBuffer, gate: TracedBuffer) -> TracedBuffer:
        return self._note("sigmoid_scale", x, gate)

    def linear(self, x: TracedBuffer, weight: TracedMatrix) -> TracedBuffer:
        return self._note("linear", x, weights=[weight])

    def rotary_and_cache(self, qkv: TracedBuffer, batch: Any, attention: Attention) -> TracedBuffer:
        norms = [norm.weight for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        return self._note("rotary_and_cache", qkv, weights=norms, attention=attention)

    def paged_attention(self, q: TracedBuffer, batch: Any, attention: Attention) -> TracedBuffer:
        sinks = [] if attention.sinks is None else [attention.sinks]
        return self._note("paged_attention", q, weights=sinks, attention=attention)

    def activate(self, x: TracedBuffer, activation: Activation) -> TracedBuffer:
        return self._note("activate", x)

    def gate_and_mul(self, x: TracedBuffer, gate: Gate) -> TracedBuffer:
        return self._note("gate_and_mul", x)

    def experts(self, x: TracedBuffer, router_logits: TracedBuffer, experts: Experts) -> TracedBuffer:
        return self._note("experts", x, router_logits, weights=[experts.gate_up, experts.down])

    def select_rows(self, x: TracedBuffer, batch: Any) -> TracedBuffer:
        return self._note("select_rows", x)

    def _norm(
        self, operation: str, x: TracedBuffer, norm: RMSNorm | LayerNorm, residual: TracedBuffer | None
    ) -> tuple[TracedBuffer, TracedBuffer]:
        inputs = (x,) if residual is None else (x, residual)
        out = self._note(operation, *inputs, weights=[norm.weight])
        return out, x if residual is None else TracedBuffer(out.maker)

    def _note(
        self,
        operation: str,
        *inputs: TracedBuffer,
        weights: Iterable[TracedWeight] = (),
        attention: Attention | None = None,
    ) -> TracedBuffer:
        call = TracedCall(operation, inputs, tuple(weights), attention)
        self.calls.append(call)
        return TracedBuffer(call)
