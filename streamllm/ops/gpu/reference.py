"""The GPU's operations in plain torch, on any device: the readable definition of what CUDA and Triton kernels
compute, and what tests run without either.

Sums are not ordered as the kernels order them, and what a step holds is read on the host, so that no graph
can hold these operations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from streamllm.ops import Activation, Experts
from streamllm.ops.gpu.expert_weights import ExpertWeights
from streamllm.ops.gpu.kernels import (
    SPLIT_SIZE,
    AdapterStack,
    AttentionShape,
    DecodeWork,
    DeviceSampling,
    PagedCache,
    PagedContext,
)
from streamllm.ops.gpu.tensor_memory import tensor_at
from streamllm.ops.gpu.torch_operations import ACTIVATIONS
from streamllm.ops.step_inputs import ROW_EDITS, SamplingBuffers
from streamllm.runner import sampler


class ReferenceKernels:
    """The protocol :class:`streamllm.ops.gpu.kernels.GpuKernels`; arithmetic in float32."""

    name = "reference"

    def rms_norm(
        self, out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> None:
        if residual is not None:
            residual.copy_(x.float() + residual.float())
            x = residual
        out.copy_(_normalized(x.float(), weight, eps))

    def act_and_mul(self, out: Tensor, x: Tensor, activation: Activation, limit: float = 0.0) -> None:
        out.copy_(_joined(x.float(), activation, limit))

    def experts(self, out: Tensor, x: Tensor, router_logits: Tensor, experts: Experts) -> None:
        chosen, weights = _routed(router_logits.float(), experts)
        total = torch.zeros(x.shape, device=x.device)
        for expert in chosen.any(0).nonzero()[:, 0].tolist():
            rows = chosen[:, expert].nonzero()[:, 0]
            both = _expert_product(x[rows], experts.gate_up, expert)
            active = _joined(both.float(), experts.gate.activation, experts.gate.limit).to(x.dtype)
            total[rows] += weights[rows, expert, None] * _expert_product(active, experts.down, expert).float()
        out.copy_(total)

    def lora_add(self, out: Tensor, x: Tensor, slots: Tensor, stack: AdapterStack) -> None:
        padded = stack.b.shape[2]
        for slot in slots[slots >= 0].unique().tolist():
            rows = (slots == slot).nonzero()[:, 0]
            rank, total = int(stack.ranks[slot]), out[rows].float()
            for part, (first, end) in enumerate(zip(stack.first_rows, stack.part_ends, strict=True)):
                a, b = stack.a[slot, part * padded :][:rank], stack.b[slot, first:end, :rank]
                total[:, first:end] += x[rows].float() @ a.float().t() @ b.float().t()
            out[rows] = total.to(out.dtype)

    def rotary_and_cache(
        self,
        qkv: Tensor,
        cache: PagedCache,
        slot_mapping: Tensor,
        rope_rows: Tensor,
        rope_cos: Tensor,
        rope_sin: Tensor,
        shape: AttentionShape,
        rotary_dim: int,
        norms: tuple[Tensor, Tensor, float] | None = None,
    ) -> None:
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        rows = qkv.view(len(qkv), -1, shape.head_dim)
        q, k, v = rows.float().split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            q, k = _normalized(q, q_weight, eps), _normalized(k, k_weight, eps)
        if rotary_dim:
            cos, sin = rope_cos[rope_rows.long()][:, None], rope_sin[rope_rows.long()][:, None]
            q, k = _rotated(q, cos, sin, rotary_dim), _rotated(k, cos, sin, rotary_dim)
        rows[:, :heads] = q.to(qkv.dtype)
        written = slot_mapping >= 0
        block_size = cache.keys.shape[2]
        block = slot_mapping[written] // block_size
        offset = slot_mapping[written] % block_size
        for x, elements, scale, scales in (
            (k[written], cache.keys, cache.key_scale, cache.key_scales),
            (v[written], cache.values, cache.value_scale, cache.value_scales),
        ):
            if scales is None:
                elements[block, :, offset] = _stored(x / scale, elements.dtype)
            else:
                elements[block, :, offset], scales[block, :, offset] = _quantized(x)

    def paged_decode(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        context: PagedContext,
        work: DecodeWork,
        shape: AttentionShape,
    ) -> None:
        num_splits = work.num_splits.tolist()
        for sequence, first in enumerate(work.first_item.tolist()):
            if first < 0:
                continue
            splits = work.items[first : first + num_splits[sequence], 1].long()
            positions = (splits[:, None] * SPLIT_SIZE + torch.arange(SPLIT_SIZE, device=q.device)).flatten()
            length = int(context.context_lens[sequence])
            row = int(context.query_start[sequence + 1]) - 1
            keys, values = _read(cache, context, sequence, positions[positions < length])
            positions = positions[positions < length]
            out[row] = _attend(q[row : row + 1], keys, values, positions, length - 1, shape)[0].to(out.dtype)

    def paged_prefill(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        context: PagedContext,
        sequences: Tensor,
        max_query_len: int,
        shape: AttentionShape,
    ) -> None:
        for sequence in sequences.tolist():
            start, end = context.query_start[sequence : sequence + 2].tolist()
            length = int(context.context_lens[sequence])
            if not 0 <= end - start <= max_query_len:
                raise ValueError(f"sequence {sequence} has {end - start} rows, more than {max_query_len}")
            first = length - (end - start)
            start_position = max(first - shape.window + 1, 0) if shape.window else 0
            positions = torch.arange(start_position, max(length, 0), device=q.device)
            keys, values = _read(cache, context, sequence, positions)
            out[start:end] = _attend(q[start:end], keys, values, positions, first, shape).to(out.dtype)

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        sources, destinations = pairs.long().unbind(1)
        copied = source[:, sources.to(source.device)]
        destination[:, destinations.to(destination.device)] = copied.to(destination.device)

    def sample(self, logits: Tensor, vocab_size: int, sampling: DeviceSampling, num_outputs: int) -> None:
        kept: list[Tensor] = []
        host = _on_host(sampling, num_outputs, vocab_size, kept)
        sampler.sample(logits[:num_outputs, :vocab_size].float().cpu().numpy(), host)
        for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
            getattr(sampling, name)[:num_outputs] = torch.from_numpy(getattr(host, name)).to(logits.device)


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _joined(x: Tensor, activation: Activation, limit: float) -> Tensor:
    """The halves of rows ``[gate | up]``."""
    gate, up = x.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def _routed(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Which experts each row uses, and with which weight: bool and float32 ``[T, num_experts]``."""
    # A stable sort, so that the lower number wins among equals.
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, : experts.top_k]
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, True)
    scored = logits.masked_fill(~chosen, float("-inf")) if experts.normalize else logits
    return chosen, scored.softmax(-1)


def _expert_product(x: Tensor, matrices: ExpertWeights, expert: int) -> Tensor:
    """In ``x``'s dtype."""
    weight, bias = matrices.dequantize(expert)
    return functional.linear(x.float(), weight, bias).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Rotates the halves of the leading ``rotary_dim`` dimensions (GPT-NeoX's pairing)."""
    half = rotary_dim // 2
    x1, x2, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the cache's dtype; what float16 and float8 cannot hold becomes their largest."""
    if dtype in (torch.float16, torch.float8_e4m3fn):
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads as int8 and the scale of each, max|x| / 127; magnitudes saturate as float16's do, and NaN makes
    the scale NaN."""
    limit = torch.finfo(torch.float16).max
    x = x.clamp(-limit, limit)
    largest = x.abs().amax(-1)
    is_zero = largest < 1e-30
    factor = 127.0 / largest.masked_fill(is_zero, 1.0)
    is_kept = ~(is_zero | largest.isnan())[..., None]
    integers = (x * factor[..., None]).masked_fill(~is_kept, 0.0).round().to(torch.int8)
    return integers, (largest / 127.0).masked_fill(is_zero, 0.0)


def _read(
    cache: PagedCache, context: PagedContext, sequence: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence at ``positions``, float32 ``[positions, KH, D]``."""
    block_size = cache.keys.shape[2]
    table = context.block_tables[int(context.table_rows[sequence])].long()
    # Blocks that left the window stand as -1; what is read in their place is masked.
    blocks, offsets = table[positions // block_size].clamp(min=0), positions % block_size
    parts = []
    for elements, scale, scales in (
        (cache.keys, cache.key_scale, cache.key_scales),
        (cache.values, cache.value_scale, cache.value_scales),
    ):
        factor = scale if scales is None else scales[blocks, :, offsets, None]
        parts.append(elements[blocks, :, offsets].float() * factor)
    return parts[0], parts[1]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, first: int, shape: AttentionShape
) -> Tensor:
    """Rows ``q [rows, H * D]``, the first at position ``first``, over keys and values at ``positions``."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    num_rows = len(q)
    queries = q.float().reshape(num_rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = queries @ keys.permute(1, 2, 0)[:, None] * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    row = torch.arange(first, first + num_rows, device=q.device)[:, None]
    visible = (positions <= row) & ((positions > row - shape.window) | (shape.window == 0))
    scores = scores.masked_fill(~visible, float("-inf"))
    if shape.sinks is not None:
        sinks = shape.sinks.view(kv_heads, heads // kv_heads, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if not len(positions):
        return torch.zeros(num_rows, heads * dim, device=q.device)
    # Values that no row sees may be stale NaN, which a weight of 0 would not remove.
    values = values.masked_fill(~visible.any(0)[:, None, None], 0.0)
    return (weights @ values.transpose(0, 1)[:, None]).permute(2, 0, 1, 3).reshape(num_rows, heads * dim)


def _on_host(
    sampling: DeviceSampling, num_outputs: int, vocab_size: int, kept: list[Tensor]
) -> SamplingBuffers:
    """The settings of the leading rows in host memory, and the arrays that their addresses name; ``kept``
    holds those."""
    device = sampling.token.device
    host = SamplingBuffers.allocate(num_outputs)
    for name in SamplingBuffers.__slots__:
        values = getattr(sampling, name)[:num_outputs].cpu().numpy()
        getattr(host, name)[:] = values.view(getattr(host, name).dtype)

    def fetched(address: int, count: int, dtype: torch.dtype) -> int:
        if not address or not count:
            return 0
        kept.append(tensor_at(address, (count,), dtype, device).cpu())
        return kept[-1].data_ptr()

    for row in range(num_outputs):
        for masks in (host.allowed_mask, host.grammar_mask):
            masks[row] = fetched(int(masks[row]), -(-vocab_size // 32), torch.int32)
        host.replacement[row] = fetched(int(host.replacement[row]), vocab_size, torch.float32)
        if address := fetched(int(host.edits[row]), ROW_EDITS.itemsize, torch.uint8):
            record = kept[-1].numpy().view(ROW_EDITS)[0]
            for ids, values, count in (
                ("bias_ids", "bias_values", "num_biases"),
                ("seen_ids", "output_counts", "num_seen"),
                ("banned_ids", None, "num_banned"),
            ):
                record[ids] = fetched(int(record[ids]), int(record[count]), torch.int32)
                if values is not None:
                    record[values] = fetched(int(record[values]), int(record[count]), torch.int32)
            host.edits[row] = address
    return host
