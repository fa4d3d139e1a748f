"""The backend of models that Transformers runs on a CPU: eager torch, native attention and sampling."""

from __future__ import annotations

from typing import Any

import torch

from streamllm.models.registry import Family
from streamllm.ops.cpu_plan import CpuOps
from streamllm.ops.native_attention import NativeAttentionOps
from streamllm.ops.plan_recorder import PlanBuffer, row_stride
from streamllm.ops.step_inputs import SamplingBuffers, StepInputs
from streamllm.runner.backends import TorchBackend


class TransformersBackend(TorchBackend):
    """The protocol :class:`streamllm.runner.backends.Backend`; phases block until they are done.

    Args:
        threads: of torch, and of the native kernels: they take turns.
        max_tokens, max_outputs: rows of a step at most.
    """

    def __init__(self, *, threads: int, max_tokens: int, max_outputs: int):
        self._former_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        self._recorder = CpuOps(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs)
        self._ops = NativeAttentionOps(self._recorder, max_tokens)

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        super().prepare(family, model, inputs, sampling, sampled_vocab_size)
        stride = row_stride(sampled_vocab_size)
        # Rows that no step has outputs for take no memory: they are never touched.
        self._drawn = torch.empty(len(inputs.output_rows), stride)
        logits = PlanBuffer(True, sampled_vocab_size, stride, address=self._drawn.data_ptr())
        self._recorder.sample(logits, sampled_vocab_size, sampling)
        self._draw = self._recorder.compile()

    def submit_draw(self) -> None:
        inputs, vocab_size = self._inputs, self._sampled_vocab_size
        self._drawn[: inputs.num_outputs, :vocab_size] = torch.from_numpy(self._logits[:, :vocab_size])
        self._draw.native.run(inputs.num_tokens, inputs.num_sequences, inputs.num_outputs)

    def close(self) -> None:
        torch.set_num_threads(self._former_threads)
