"""The operations computed at once over one prompt, in numpy, with weights that are read when they are used.

For a single pass over a model that need not be in memory: a matrix is there for as long as its product takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streamllm.models.checkpoint import Checkpoint
from streamllm.models.dequantize import to_float32
from streamllm.models.rope import RopeTable
from streamllm.ops import Activation, Attention, Experts, Gate, LayerNorm, RMSNorm
from streamllm.ops.stored_rows import StoredRows

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a checkpoint: its layers ``(name, rows)``, stacked row-wise."""

    parts: tuple[tuple[str, int], ...]
    columns: int
    bias: bool


class StoredWeights:
    """A model's weights as names of where they lie; vectors are read (a
    :class:`streamllm.models.weights.WeightLoader`)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool = False) -> StoredMatrix:
        return StoredMatrix(tuple(parts), columns, bias)

    def experts(
        self, experts: Sequence[Sequence[tuple[str, int]]], columns: int, *, bias: bool = False
    ) -> tuple[StoredMatrix, ...]:
        return tuple(StoredMatrix(tuple(parts), columns, bias) for parts in experts)

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        return RMSNorm(self.vector(f"{name}.weight", size) + np.float32(offset), size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, affine: bool = True) -> LayerNorm:
        if not affine:
            return LayerNorm(np.ones(size, np.float32), np.zeros(size, np.float32), size, eps)
        return LayerNorm(self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size), size, eps)

    def vector(self, name: str, size: int) -> Array:
        return self._checkpoint.read(name)


class PromptOps:
    """The operations of :class:`streamllm.ops.Ops` on the tokens of one prompt, from position 0 on; buffers
    are float32 ``[tokens, width]``, weights those of :class:`StoredWeights`. The batch is not looked at.

    Args:
        rope: with a row for each position.
        token_ids: the prompt.
        on_product: is called before a matrix is read, with the names of its tensors and what it is multiplied
            by.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rope: RopeTable,
        token_ids: Sequence[int],
        on_product: Callable[[tuple[str, ...], Array], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._rope = rope
        self._token_ids = np.asarray(token_ids)
        self._on_product = on_product
        self._keys_and_values: tuple[Array, Array]

    def embedding(self, batch: object, weight: StoredMatrix, first_row: int | None = None) -> Array:
        assert first_row is None, "the weights of a checkpoint have all rows"
        return self._rows(weight, self._token_ids)

    def position_embedding(self, batch: object, weight: StoredMatrix) -> Array:
        return self._rows(weight, np.arange(len(self._token_ids)))

    def rms_norm(self, x: Array, norm: RMSNorm, residual: Array | None = None) -> tuple[Array, Array]:
        total = x if residual is None else x + residual
        return _normalized(total, norm), total

    def layer_norm(self, x: Array, norm: LayerNorm, residual: Array | None = None) -> tuple[Array, Array]:
        total = x if residual is None else x + residual
        centred = total - total.mean(-1, keepdims=True)
        variance = np.square(centred).mean(-1, keepdims=True)
        return centred / np.sqrt(variance + np.float32(norm.eps)) * norm.weight + norm.bias, total

    def add(self, x: Array, other: Array) -> Array:
        return x + other

    def scale(self, x: Array, factor: float) -> Array:
        return x * np.float32(factor)

    def soft_cap(self, x: Array, cap: float) -> Array:
        return np.float32(cap) * np.tanh(x / np.float32(cap))

    def sigmoid_scale(self, x: Array, gate: Array) -> Array:
        return x * _sigmoid(gate)

    def linear(self, x: Array, weight: StoredMatrix) -> Array:
        self._on_product(tuple(f"{name}.weight" for name, _ in weight.parts), x)
        return np.concatenate([self._product(x, name, weight.bias) for name, _ in weight.parts], axis=-1)

    def rotary_and_cache(self, qkv: Array, batch: object, attention: Attention) -> Array:
        widths = np.array([attention.num_heads, attention.num_kv_heads]) * attention.head_dim
        q, k, v = (
            part.reshape(len(qkv), -1, attention.head_dim) for part in np.split(qkv, np.cumsum(widths), -1)
        )
        q = self._rotated(_normalized_heads(q, attention.q_norm), attention)
        k = self._rotated(_normalized_heads(k, attention.k_norm), attention)
        self._keys_and_values = k, v
        return q.reshape(len(q), attention.q_width)

    def paged_attention(self, q: Array, batch: object, attention: Attention) -> Array:
        """Over the keys and values that :meth:`rotary_and_cache` was called with last."""
        keys, values = self._keys_and_values
        heads = q.reshape(len(q), attention.num_heads, attention.head_dim)
        group = attention.num_heads // attention.num_kv_heads
        distance = np.arange(len(q))[:, None] - np.arange(len(q))
        visible = (distance >= 0) & (distance < (attention.window or len(q)))
        out = np.empty_like(heads)
        for head in range(attention.num_heads):
            scores = heads[:, head] @ keys[:, head // group].T * np.float32(attention.scale)
            if attention.soft_cap:
                scores = self.soft_cap(scores, attention.soft_cap)
            scores[~visible] = -np.inf
            sink = None if attention.sinks is None else attention.sinks[head]
            out[:, head] = _softmax(scores, sink) @ values[:, head // group]
        return out.reshape(len(q), -1)

    def activate(self, x: Array, activation: Activation) -> Array:
        if activation == "relu":
            return np.maximum(x, 0)
        if activation == "silu":
            return x * _sigmoid(x)
        # For the exact GELU too, which is within 0.0005 of it.
        return x * _sigmoid(np.float32(1.5957691) * (x + np.float32(0.044715) * x * x * x))

    def gate_and_mul(self, x: Array, gate: Gate) -> Array:
        gated, up = np.split(x, 2, axis=-1)
        if gate.limit:
            gated, up = np.minimum(gated, gate.limit), np.clip(up, -gate.limit, gate.limit)
            return gated * _sigmoid(np.float32(1.702) * gated) * (up + 1)
        return self.activate(gated, gate.activation) * up

    def experts(self, x: Array, router_logits: Array, experts: Experts) -> Array:
        # A stable sort, so that the lower number wins among equals.
        chosen = np.argsort(-router_logits, axis=-1, kind="stable")[:, : experts.top_k]
        is_chosen = np.zeros(router_logits.shape, bool)
        np.put_along_axis(is_chosen, chosen, True, axis=-1)
        scored = np.where(is_chosen, router_logits, -np.inf) if experts.normalize else router_logits
        weights = _softmax(scored)
        out = np.zeros_like(x)
        for expert in range(experts.num_experts):
            rows = np.flatnonzero(is_chosen[:, expert])
            hidden = self.gate_and_mul(self.linear(x[rows], experts.gate_up[expert]), experts.gate)
            out[rows] += weights[rows, expert, None] * self.linear(hidden, experts.down[expert])
        return out

    def _product(self, x: Array, name: str, bias: bool) -> Array:
        product = x @ self._checkpoint.read(f"{name}.weight").T
        self._checkpoint.release(f"{name}.weight")
        return product + self._checkpoint.read(f"{name}.bias") if bias else product

    def _rows(self, weight: StoredMatrix, ids: npt.NDArray[np.integer]) -> Array:
        name = f"{weight.parts[0][0]}.weight"
        stored = self._checkpoint.read_stored(name)
        return to_float32(StoredRows(stored.format, np.ascontiguousarray(stored.data[ids])), name)

    def _rotated(self, heads: Array, attention: Attention) -> Array:
        if not attention.rotary_dim:
            return heads
        half = attention.rotary_dim // 2
        cos, sin = (table[attention.rope][: len(heads), None] for table in (self._rope.cos, self._rope.sin))
        x1, x2, rest = np.split(heads, [half, 2 * half], axis=-1)
        return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)


def _normalized(x: Array, norm: RMSNorm) -> Array:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(norm.eps)) * norm.weight


def _normalized_heads(heads: Array, norm: RMSNorm | None) -> Array:
    if norm is None:
        return heads
    return _normalized(heads.reshape(len(heads), -1, norm.size), norm).reshape(heads.shape)


def _sigmoid(x: Array) -> Array:
    half = np.float32(0.5)
    return half + half * np.tanh(half * x)


def _softmax(scores: Array, sink: np.float32 | None = None) -> Array:
    """Over the last axis; ``sink`` is one more score, whose weight is left out."""
    if sink is not None:
        with_sink = np.concatenate([scores, np.full((*scores.shape[:-1], 1), sink)], axis=-1)
        return _softmax(with_sink)[..., :-1]
    weights: Array = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights
