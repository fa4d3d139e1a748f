"""The operations computed at once on torch tensors in float32: the reference of every other backend.

Keys and values live in the same paged memory, read and written through the same slots and block tables as the
native kernels use. Readable first; nothing on the CPU serving path imports this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamllm.ops import Activation, Attention, Experts, Gate, LayerNorm, RMSNorm
from streamllm.ops.kv_cache import KEY_LANES
from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.ops.step_inputs import StepInputs
from streamllm.ops.stored_rows import StoredRows


@dataclass(frozen=True)
class TorchLinear:
    """``weight [n, k]`` and ``bias [n]`` or ``None``, float32."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class TorchAdapted:
    """A weight, and by slot what its adapter adds: first row, ``a [rank, k]`` and ``b [rows, rank]`` of each
    update."""

    base: TorchLinear
    slots: dict[int, list[tuple[int, Tensor, Tensor]]]


@dataclass(frozen=True)
class TorchExperts:
    """``weight [experts, n, k]`` and ``bias [experts, n]`` or ``None``, float32."""

    weight: Tensor
    bias: Tensor | None


def _tensor(array: np.ndarray, count: int) -> Tensor:
    """The first ``count`` entries as an int64 tensor that can index others."""
    return torch.from_numpy(array[:count].astype(np.int64))


def _quantized(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Heads ``[..., head_dim]`` as integers from -127 to 127, and their scales ``[...]``, both in float32.
    NaN makes the scale NaN."""
    largest = heads.abs().amax(-1)
    tiny = largest < 1e-30
    factor = (127.0 / largest).masked_fill(tiny, 0.0)
    integers = (heads * factor[..., None]).round().nan_to_num(0.0)
    return integers, (largest / 127.0).masked_fill(tiny, 0.0)


class TorchOps:
    """Eager operations (the protocol :class:`streamllm.ops.Ops`); buffers are tensors ``[rows, width]``."""

    packed_formats: frozenset[str] = frozenset()
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, lora: LoraLimits | None = None) -> None:
        self.weight_bytes = 0
        self.lora = lora
        self._adapted: dict[str, TorchAdapted] = {}
        self._row_slots: Tensor | None = None

    def matrix(
        self,
        rows: int,
        columns: int,
        parts: Iterable[np.ndarray | StoredRows],
        bias: np.ndarray | None = None,
    ) -> TorchLinear:
        weight = torch.empty(rows, columns)
        first_row = 0
        for part in parts:
            if isinstance(part, StoredRows):
                raise ValueError(f"rows in the format {part.format} must be dequantised for torch")
            weight[first_row : first_row + len(part)] = torch.tensor(part)
            first_row += len(part)
        if first_row != rows:
            raise ValueError(f"the parts of a weight [{rows}, {columns}] have {first_row} rows")
        self.weight_bytes += weight.nbytes
        return TorchLinear(weight, None if bias is None else self.vector(bias))

    def expert_matrices(
        self,
        rows: int,
        columns: int,
        experts: Iterable[Iterable[np.ndarray | StoredRows]],
        bias: np.ndarray | None = None,
    ) -> TorchExperts:
        weights = [self.matrix(rows, columns, parts).weight for parts in experts]
        return TorchExperts(torch.stack(weights), None if bias is None else self.vector(bias))

    def vector(self, values: np.ndarray) -> Tensor:
        vector = torch.tensor(values, dtype=torch.float32)
        self.weight_bytes += vector.nbytes
        return vector

    def adapted(self, weight: TorchLinear, name: str, parts: Sequence[int]) -> TorchAdapted:
        self._adapted[name] = adapted = TorchAdapted(weight, {})
        return adapted

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        pass

    def load_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        for name, matrix in self._adapted.items():
            matrix.slots[slot] = [
                (update.first_row, torch.tensor(update.a), torch.tensor(update.b))
                for update in (adapter.updates.get(name, ()) if adapter is not None else ())
            ]

    def assign_adapters(self, batch: StepInputs) -> None:
        """Takes the step's row table, before its forward."""
        self._row_slots = _tensor(batch.lora_slots, batch.num_tokens) if batch.has_adapters else None

    def lora_add(self, out: Tensor, x: Tensor, weight: TorchAdapted) -> Tensor:
        if self._row_slots is None:
            return out
        for slot in self._row_slots[self._row_slots >= 0].unique().tolist():
            rows = (self._row_slots == slot).nonzero()[:, 0]
            for first_row, a, b in weight.slots.get(slot, ()):
                out[rows, first_row : first_row + len(b)] += x[rows] @ a.T @ b.T
        return out

    def embedding(self, batch: StepInputs, weight: TorchLinear, first_row: int | None = None) -> Tensor:
        ids = _tensor(batch.token_ids, batch.num_tokens)
        if first_row is None:
            return weight.weight[ids]
        missing = (ids < first_row) | (ids >= first_row + len(weight.weight))
        return weight.weight[(ids - first_row).masked_fill(missing, 0)].masked_fill(missing[:, None], 0.0)

    def position_embedding(self, batch: StepInputs, weight: TorchLinear) -> Tensor:
        return weight.weight[_tensor(batch.rope_rows, batch.num_tokens)]

    def rms_norm(self, x: Tensor, norm: RMSNorm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self._normalize(total, norm), total

    def layer_norm(self, x: Tensor, norm: LayerNorm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return torch.nn.functional.layer_norm(total, (norm.size,), norm.weight, norm.bias, norm.eps), total

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap)

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def linear(self, x: Tensor, weight: TorchLinear | TorchAdapted) -> Tensor:
        if isinstance(weight, TorchAdapted):
            return self.lora_add(self.linear(x, weight.base), x, weight)
        return torch.nn.functional.linear(x, weight.weight, weight.bias)

    def rotary_and_cache(self, qkv: Tensor, batch: StepInputs, attention: Attention) -> Tensor:
        count, heads, kv_heads = batch.num_tokens, attention.num_heads, attention.num_kv_heads
        q, k, v = qkv.view(count, -1, attention.head_dim).split([heads, kv_heads, kv_heads], dim=1)
        if attention.q_norm:
            q = self._normalize(q.reshape(count, -1, attention.q_norm.size), attention.q_norm).view_as(q)
        if attention.k_norm:
            k = self._normalize(k.reshape(count, -1, attention.k_norm.size), attention.k_norm).view_as(k)
        if attention.rotary_dim:
            rows = _tensor(batch.rope_rows, count)
            cos = torch.from_numpy(batch.rope_cos[attention.rope])[rows][:, None]
            sin = torch.from_numpy(batch.rope_sin[attention.rope])[rows][:, None]
            q = self._rotate(q, cos, sin, attention.rotary_dim)
            k = self._rotate(k, cos, sin, attention.rotary_dim)
        self._write_cache(k, v, batch, attention)
        return q.reshape(count, attention.q_width)

    def paged_attention(self, q: Tensor, batch: StepInputs, attention: Attention) -> Tensor:
        out = torch.empty(batch.num_tokens, attention.q_width)
        for sequence in range(batch.num_sequences):
            start, end = (int(row) for row in batch.query_start[sequence : sequence + 2])
            out[start:end] = self._attend(q[start:end], sequence, batch, attention)
        return out

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        functional = torch.nn.functional
        if activation == "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        known: dict[str, Callable[[Tensor], Tensor]] = {
            "silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
        }  # fmt: skip
        return known[activation](x)

    def gate_and_mul(self, x: Tensor, gate: Gate) -> Tensor:
        gated, up = x.chunk(2, dim=-1)
        if gate.limit:
            gated, up = gated.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
            return gated * torch.sigmoid(1.702 * gated) * (up + 1)
        return self.activate(gated, gate.activation) * up

    def experts(self, x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
        # A stable sort, so that the lower number wins among equals.
        order = router_logits.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
        chosen = torch.zeros_like(router_logits, dtype=torch.bool).scatter_(1, order, True)
        scored = router_logits.masked_fill(~chosen, float("-inf")) if experts.normalize else router_logits
        weights = scored.softmax(-1)
        out = torch.zeros_like(x)
        for expert in range(experts.num_experts):
            rows = chosen[:, expert].nonzero()[:, 0]
            hidden = self._expert(x[rows], experts.gate_up, expert)
            hidden = self._expert(self.gate_and_mul(hidden, experts.gate), experts.down, expert)
            out[rows] += weights[rows, expert, None] * hidden
        return out

    def select_rows(self, x: Tensor, batch: StepInputs) -> Tensor:
        return x[_tensor(batch.output_rows, batch.num_outputs)]

    @staticmethod
    def _expert(x: Tensor, matrices: TorchExperts, expert: int) -> Tensor:
        bias = None if matrices.bias is None else matrices.bias[expert]
        return torch.nn.functional.linear(x, matrices.weight[expert], bias)

    @staticmethod
    def _normalize(x: Tensor, norm: RMSNorm) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
        """Rotates the halves of the leading ``rotary_dim`` dimensions (GPT-NeoX's pairing)."""
        half = rotary_dim // 2
        x1, x2, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)

    @staticmethod
    def _write_cache(k: Tensor, v: Tensor, batch: StepInputs, attention: Attention) -> None:
        cache = batch.kv_cache
        keys = torch.from_numpy(cache.keys(attention.place))
        values = torch.from_numpy(cache.values(attention.place))
        if keys.dtype != torch.float32:
            limit = torch.finfo(torch.float16).max
            k, v = k.clamp(-limit, limit), v.clamp(-limit, limit)
        slots = _tensor(batch.slot_mapping[attention.group], batch.num_tokens)
        written = slots >= 0
        slots, k, v = slots[written], k[written], v[written]
        block, offset = slots // cache.block_size, slots % cache.block_size
        tile, lane = offset // KEY_LANES, offset % KEY_LANES
        if keys.dtype == torch.int8:
            scales = torch.from_numpy(cache.scales(attention.place))
            k, scales[0][block, :, tile, lane] = _quantized(k)
            v, scales[1][block, :, tile, lane] = _quantized(v)
        keys[block, :, tile, :, lane] = k.to(keys.dtype)
        values[block, :, tile, lane] = v.to(values.dtype)

    @staticmethod
    def _attend(q: Tensor, sequence: int, batch: StepInputs, attention: Attention) -> Tensor:
        """One sequence's rows ``[rows, q_width]`` over its whole context, read from its blocks."""
        cache, context = batch.kv_cache, int(batch.context_lens[sequence])
        num_rows, heads, kv_heads = len(q), attention.num_heads, attention.num_kv_heads
        num_blocks = -(-context // cache.block_size)
        address = int(batch.block_tables[attention.group, sequence])
        table = np.ctypeslib.as_array((ctypes.c_int32 * num_blocks).from_address(address))
        # Blocks that left the window stand as -1; what is read in their place is masked.
        blocks = _tensor(table, num_blocks).clamp(min=0)
        keys = torch.from_numpy(cache.keys(attention.place))[blocks].float().transpose(-1, -2)
        values = torch.from_numpy(cache.values(attention.place))[blocks].float()
        if cache.dtype_name == "int8":
            scales = torch.from_numpy(cache.scales(attention.place))[:, blocks, ..., None]
            keys, values = keys * scales[0], values * scales[1]
        keys = keys.transpose(0, 1).reshape(kv_heads, -1, attention.head_dim)[:, :context]
        values = values.transpose(0, 1).reshape(kv_heads, -1, attention.head_dim)[:, :context]
        queries = q.view(num_rows, kv_heads, heads // kv_heads, attention.head_dim).permute(1, 2, 0, 3)
        scores = queries @ keys.transpose(1, 2)[:, None] * attention.scale
        if attention.soft_cap:
            scores = attention.soft_cap * torch.tanh(scores / attention.soft_cap)
        row = torch.arange(context - num_rows, context)[:, None]
        position = torch.arange(context)
        visible = position <= row
        if attention.window:
            visible &= position > row - attention.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if attention.sinks is not None:
            sinks = attention.sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, num_rows, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :context]
        return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(num_rows, attention.q_width)
