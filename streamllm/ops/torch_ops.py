"""The operations computed at once on torch tensors in float32: the reference of every other backend.

Keys and values live in the same paged memory, read and written through the same slots and block tables as the
native kernels use. Readable first; nothing on the CPU serving path imports this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamllm.ops import Attention, RMSNorm
from streamllm.ops.kv_cache import KEY_LANES
from streamllm.ops.step_inputs import StepInputs
from streamllm.ops.stored_rows import StoredRows


@dataclass(frozen=True)
class TorchLinear:
    """``weight [n, k]`` and ``bias [n]`` or ``None``, float32."""

    weight: Tensor
    bias: Tensor | None


def _tensor(array: np.ndarray, count: int) -> Tensor:
    """The first ``count`` entries as an int64 tensor that can index others."""
    return torch.from_numpy(array[:count].astype(np.int64))


class TorchOps:
    """Eager operations (the protocol :class:`streamllm.ops.Ops`); buffers are tensors ``[rows, width]``."""

    packed_formats: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.weight_bytes = 0

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

    def vector(self, values: np.ndarray) -> Tensor:
        vector = torch.tensor(values, dtype=torch.float32)
        self.weight_bytes += vector.nbytes
        return vector

    def embedding(self, batch: StepInputs, weight: TorchLinear) -> Tensor:
        return weight.weight[_tensor(batch.token_ids, batch.num_tokens)]

    def rms_norm(self, x: Tensor, norm: RMSNorm, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self._normalize(total, norm), total

    def linear(self, x: Tensor, weight: TorchLinear) -> Tensor:
        return torch.nn.functional.linear(x, weight.weight, weight.bias)

    def rotary_and_cache(self, qkv: Tensor, batch: StepInputs, attention: Attention) -> Tensor:
        count, heads, kv_heads = batch.num_tokens, attention.num_heads, attention.num_kv_heads
        q, k, v = qkv.view(count, -1, attention.head_dim).split([heads, kv_heads, kv_heads], dim=1)
        if attention.q_norm:
            q = self._normalize(q, attention.q_norm)
        if attention.k_norm:
            k = self._normalize(k, attention.k_norm)
        rows = _tensor(batch.rope_rows, count)
        cos = torch.from_numpy(batch.rope_cos)[rows][:, None]
        sin = torch.from_numpy(batch.rope_sin)[rows][:, None]
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

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def select_rows(self, x: Tensor, batch: StepInputs) -> Tensor:
        return x[_tensor(batch.output_rows, batch.num_outputs)]

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
        if keys.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            k, v = k.clamp(-limit, limit), v.clamp(-limit, limit)
        slots = _tensor(batch.slot_mapping[attention.group], batch.num_tokens)
        written = slots >= 0
        slots = slots[written]
        block, offset = slots // cache.block_size, slots % cache.block_size
        keys[block, :, offset // KEY_LANES, :, offset % KEY_LANES] = k[written].to(keys.dtype)
        values[block, :, offset] = v[written].to(values.dtype)

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
        keys = torch.from_numpy(cache.keys(attention.place))[blocks].float()
        keys = keys.permute(1, 0, 2, 4, 3).reshape(kv_heads, -1, attention.head_dim)[:, :context]
        values = torch.from_numpy(cache.values(attention.place))[blocks].float()
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
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(num_rows, attention.q_width)
