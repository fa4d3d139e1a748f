"""Operations on torch tensors in the host's memory, with attention by the native kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from streamllm.ops import Attention, RMSNorm
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.plan_recorder import CompiledPlan, PlanBuffer, row_stride
from streamllm.ops.step_inputs import StepInputs
from streamllm.ops.torch_ops import TorchOps


class NativeAttentionOps(TorchOps):
    """As :class:`TorchOps`, but a layer's cache write and attention are one native plan over memory that
    stays where it is. The layers of a model must have equally many heads of one width.

    Args:
        recorder: makes the plans.
        max_tokens: rows of a step at most.
    """

    def __init__(self, recorder: CpuOps, max_tokens: int):
        super().__init__()
        self._recorder, self._max_tokens = recorder, max_tokens
        self._plans: dict[tuple[int, int], CompiledPlan] = {}
        self._qkv = self._out = torch.empty(0, 0)

    def rotary_and_cache(self, qkv: Tensor, batch: StepInputs, attention: Attention) -> Tensor:
        """Takes the rows; what is to be done with them is done together with the attention that follows."""
        if (attention.group, attention.place) not in self._plans:
            self._record(batch, attention)
        self._qkv[: len(qkv), : qkv.shape[1]] = qkv
        return self._qkv[: len(qkv), : attention.q_width]

    def paged_attention(self, q: Tensor, batch: StepInputs, attention: Attention) -> Tensor:
        plan = self._plans[attention.group, attention.place]
        plan.native.run(batch.num_tokens, batch.num_sequences, batch.num_outputs)
        return self._out[: len(q), : attention.q_width].clone()

    def _record(self, batch: StepInputs, attention: Attention) -> None:
        qkv_width = attention.q_width + 2 * attention.num_kv_heads * attention.head_dim
        if not self._plans:
            self._qkv, self._out = self._rows(qkv_width), self._rows(attention.q_width)
        recorder, host = self._recorder, _in_numpy(attention)
        q = recorder.rotary_and_cache(_plan_buffer(self._qkv, qkv_width), batch, host)
        out = recorder.paged_attention(q, batch, host)
        out.address = self._out.data_ptr()
        self._plans[attention.group, attention.place] = recorder.compile()

    def _rows(self, width: int) -> Tensor:
        return torch.empty(self._max_tokens, row_stride(width))


def _plan_buffer(rows: Tensor, width: int) -> PlanBuffer:
    """A tensor's memory, as a plan takes it."""
    return PlanBuffer(on_outputs=False, width=width, stride=rows.shape[1], address=rows.data_ptr())


def _in_numpy(attention: Attention) -> Attention:
    """The same with the vectors that it holds as plans take them, in the same memory."""

    def norm_in_numpy(norm: RMSNorm | None) -> RMSNorm | None:
        return None if norm is None else replace(norm, weight=norm.weight.numpy())

    sinks = None if attention.sinks is None else attention.sinks.numpy()
    return replace(
        attention,
        sinks=sinks,
        q_norm=norm_in_numpy(attention.q_norm),
        k_norm=norm_in_numpy(attention.k_norm),
    )
