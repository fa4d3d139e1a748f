"""What the GPU's operations are given in tests, beside the reference on float32 tensors
(:class:`TorchOps`)."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from streamllm.ops import Attention, Experts, Gate, LayerNorm, Ops, RMSNorm
from streamllm.ops.gpu.device_inputs import DeviceBatch, DeviceInputs
from streamllm.ops.gpu.device_kv_cache import DeviceKVCache
from streamllm.ops.gpu.gpu_ops import GpuOps
from streamllm.ops.gpu.kernels import GpuKernels
from streamllm.ops.gpu.staged_step import StagedStep, StepSizes
from streamllm.ops.kv_cache import KVCache
from streamllm.ops.step_inputs import StepInputs
from streamllm.ops.torch_ops import TorchOps

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS, MAX_SEQUENCES = 16, 12, 64, 4
TABLES = np.array([[7, 2, 4, 0], [1, 9, 5, 11]], np.int32)
"""Blocks of two sequences, of up to 64 tokens each."""


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _rope(seed: int, rotary_dim: int) -> tuple[np.ndarray, np.ndarray]:
    angles = random(seed, 64, rotary_dim // 2)
    return np.cos(angles), np.sin(angles)


ROPES = (_rope(3, HEAD_DIM), _rope(4, HEAD_DIM // 2))
ATTENTION_LAYERS: dict[str, dict[str, Any]] = {
    "second embedding, sinks": {
        "rope": 1,
        "rotary_dim": HEAD_DIM // 2,
        "sinks": [0.5, -3.0, 2.0, float("-inf")],
        "window": 20,
    },
    "no rotation, soft cap": {"rotary_dim": 0, "soft_cap": 1.5, "sinks": [1.0] * HEADS},
    "norms over heads": {"q_norm": HEAD_DIM, "k_norm": HEAD_DIM},
    "norms over all heads": {"q_norm": HEADS * HEAD_DIM, "k_norm": KV_HEADS * HEAD_DIM},
    "one norm": {"k_norm": HEAD_DIM},
}
"""Fields of :class:`Attention`, norms as their sizes; vectors are made by a side's operations."""


def attention_of(ops: Ops, fields: dict[str, Any]) -> Attention:
    """A layer of ATTENTION_LAYERS."""
    made = {"rotary_dim": HEAD_DIM, "scale": 0.25, **fields}
    for seed, name in enumerate(("q_norm", "k_norm")):
        if name in fields:
            made[name] = RMSNorm(ops.vector(random(seed, fields[name])), fields[name], 1e-6)
    if "sinks" in fields:
        made["sinks"] = ops.vector(np.array(fields["sinks"], np.float32))
    return Attention(0, 0, HEADS, KV_HEADS, HEAD_DIM, **made)


class StepPair:
    """Steps of two sequences through one layer of ATTENTION_LAYERS, on both sides, whose caches lie
    differently.

    Args:
        kernels: of the GPU's side.
        device: where that is.
    """

    def __init__(self, kernels: GpuKernels, fields: dict[str, Any], device: str = "cpu"):
        self._torch_ops = TorchOps()
        self._gpu_ops = GpuOps(kernels, torch.device(device), torch.float32)
        sizes = {
            "layers_per_block": 1,
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "num_kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "kv_cache_dtype": "float32",
        }
        self._fields, window = fields, fields.get("window", 0)
        step_sizes = StepSizes(MAX_TOKENS, MAX_SEQUENCES, MAX_SEQUENCES, MAX_SEQUENCES, (window,), 4, 16)
        cos, sin = zip(*ROPES, strict=True)
        cache = DeviceKVCache(kernels, **sizes, device=torch.device(device))
        partials = torch.empty(16, HEADS, HEAD_DIM + 2, device=device)
        self._device = DeviceInputs(step_sizes, cache, cos, sin, partials, torch.device(device))
        self._staged = StagedStep(step_sizes, pinned=False)
        self._inputs = StepInputs.allocate(MAX_TOKENS, MAX_SEQUENCES, cos, sin, KVCache(**sizes))
        self._inputs.slots[:2] = 0, 1

    def attend(self, seed: int, computed: list[int], chunks: list[int]) -> tuple[list[torch.Tensor], ...]:
        """Queries and attention of a step of random rows, by the reference and by the GPU's operations.

        Args:
            computed, chunks: tokens of each sequence before the step, and in it.
        """
        batch = self._fill(computed, chunks)
        qkv = torch.from_numpy(random(seed, sum(chunks), (HEADS + 2 * KV_HEADS) * HEAD_DIM))
        results = []
        for ops, step, rows in (
            (self._torch_ops, self._inputs, qkv),
            (self._gpu_ops, batch, qkv.to(self._gpu_ops.device, copy=True)),
        ):
            attention = attention_of(ops, self._fields)
            q = ops.rotary_and_cache(rows, step, attention)
            results.append([q.cpu().clone(), ops.paged_attention(q, step, attention).cpu()])
        return tuple(results)

    def _fill(self, computed: list[int], chunks: list[int]) -> DeviceBatch:
        inputs, row = self._inputs, 0
        for sequence, (start, count) in enumerate(zip(computed, chunks, strict=True)):
            positions = np.arange(start, start + count)
            rows = slice(row, row + count)
            inputs.token_ids[rows] = inputs.rope_rows[rows] = positions
            blocks = TABLES[sequence, positions // BLOCK_SIZE].astype(np.int64)
            inputs.slot_mapping[0, rows] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            inputs.context_lens[sequence] = start + count
            inputs.block_tables[0, sequence] = TABLES[sequence].ctypes.data
            row += count
            inputs.query_start[sequence + 1] = row
        inputs.num_tokens, inputs.num_sequences = row, len(chunks)
        changes = [(0, sequence, 0, TABLES[sequence].tolist()) for sequence in range(len(chunks))]
        return self._device.send_forward(
            self._staged, inputs, changes, padded_tokens=row, padded_sequences=len(chunks)
        )


class MixtureLayer:
    """A layer of every operation but attention, 32 wide, over eight positions.

    Args:
        ops: of either side.
    """

    def __init__(self, ops: Any):
        self._ops = ops
        self._positions = ops.matrix(8, 32, [random(1, 8, 32)])
        self._norm = LayerNorm(ops.vector(random(2, 32)), ops.vector(random(3, 32)), 32, 1e-5)
        self._router = ops.matrix(3, 32, [random(4, 3, 32)])
        self._gate = ops.matrix(1, 32, [random(5, 1, 32)])
        self._both = ops.matrix(64, 32, [random(6, 64, 32)])
        self._experts = Experts(
            ops.expert_matrices(32, 32, self._parts(7, 32, 32), random(10, 3, 32)),
            ops.expert_matrices(32, 16, self._parts(8, 32, 16)),
            num_experts=3,
            top_k=2,
            normalize=True,
            gate=Gate(limit=2.0),
        )

    @staticmethod
    def _parts(seed: int, n: int, k: int) -> Iterable[list[np.ndarray]]:
        return ([random(100 * expert + seed, n, k)] for expert in range(3))

    def __call__(self, x: Any, positions: Any) -> torch.Tensor:
        """Of rows ``x``, which stay as they are, at ``positions``, int32 of the side's library."""
        ops, batch = self._ops, SimpleNamespace(num_tokens=len(x), rope_rows=positions)
        hidden = ops.add(x, ops.position_embedding(batch, self._positions))
        hidden, residual = ops.layer_norm(ops.scale(hidden, 1.5), self._norm)
        mixed = ops.experts(hidden, ops.linear(hidden, self._router), self._experts)
        shared = ops.sigmoid_scale(ops.activate(hidden, "relu"), ops.linear(hidden, self._gate))
        hidden, _ = ops.layer_norm(ops.add(shared, mixed), self._norm, residual)
        return ops.soft_cap(ops.gate_and_mul(ops.linear(hidden, self._both), Gate("relu")), 2.0)
