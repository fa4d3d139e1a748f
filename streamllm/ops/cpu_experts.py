"""Mixture-of-experts layers in native plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from streamllm.ops import Experts
from streamllm.ops.plan_recorder import PlanBuffer, address_of


@dataclass(frozen=True)
class PackedExperts:
    """A native weight ``[n, k]`` an expert, in whatever formats their rows were stored, and their biases
    (float32 ``[num_experts, n]``), if any."""

    packed: tuple[Any, ...]
    bias: np.ndarray | None

    @property
    def is_quantized(self) -> bool:
        """Whether all rows are, so that products take their activations quantised."""
        return all(matrix.is_quantized for matrix in self.packed)


def quantizable_buffers(experts: Experts, x: PlanBuffer, active: PlanBuffer) -> frozenset[PlanBuffer]:
    """Those that the layer reads, or writes, quantised."""
    gate_up, down = experts.gate_up.is_quantized, experts.down.is_quantized
    return frozenset(([x] if gate_up else []) + ([active] if down else []))


def emit_experts(
    plan: Any,
    experts: Experts,
    x: PlanBuffer,
    router_logits: PlanBuffer,
    active: PlanBuffer,
    out: PlanBuffer,
) -> None:
    """Adds the layer to a native plan.

    Args:
        active: room for the joined halves of ``top_k`` rows a row of ``x``.
    """
    plan.experts(
        x.address,
        x.stride,
        x.quantized,
        router_logits.address,
        router_logits.stride,
        list(experts.gate_up.packed),
        address_of(experts.gate_up.bias),
        list(experts.down.packed),
        address_of(experts.down.bias),
        experts.top_k,
        experts.normalize,
        experts.gate.activation,
        experts.gate.limit,
        active.address,
        active.stride,
        active.quantized,
        out.address,
        out.stride,
        x.on_outputs,
    )
