"""How a step's two phases run: as recorded native plans, or eagerly on torch."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import Family
from streamllm.models.weights import WeightLoader, WeightMode
from streamllm.ops import Ops
from streamllm.ops.cpu_plan import CompiledPlan, CpuOps
from streamllm.ops.step_inputs import SamplingBuffers, StepInputs
from streamllm.runner import sampler


class Backend(Protocol):
    """Runs the forward, then logits and sampling, over buffers that were given once.

    Attributes:
        event_fd: becomes readable when a submitted phase is done; ``None`` if phases block until then.
    """

    event_fd: int | None

    @property
    def ops(self) -> Ops:
        """What makes the weights."""

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        """Binds model and buffers, before the first step."""

    def submit_forward(self) -> None: ...

    def submit_sample(self) -> None: ...

    def wait(self) -> None:
        """Blocks until the submitted phase is done; takes its signal from ``event_fd``."""

    def logits(self) -> np.ndarray:
        """The last step's logits, float32 ``[outputs, vocab_size]``; a view that the next step changes."""

    def close(self) -> None: ...


class PlanBackend:
    """Native plans: one for the forward, one for logits and sampling."""

    def __init__(self, *, threads: int, max_tokens: int, max_outputs: int):
        self._ops = CpuOps(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs)
        self.event_fd: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self._submitted: CompiledPlan | None = None

    @property
    def ops(self) -> Ops:
        return self._ops

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        self._inputs = inputs
        ops = self._ops
        hidden = family.forward(model, ops, inputs)
        self._forward = ops.compile(keep=[hidden])
        self._logits = family.logits(model, ops, ops.select_rows(hidden, inputs))
        ops.sample(self._logits, sampled_vocab_size, sampling)
        self._head = ops.compile(keep=[self._logits])

    def submit_forward(self) -> None:
        self._submit(self._forward)

    def submit_sample(self) -> None:
        self._submit(self._head)

    def wait(self) -> None:
        if self._submitted is not None and self.event_fd is not None:
            os.eventfd_read(self.event_fd)
            self._submitted.native.wait()
            self._submitted = None

    def logits(self) -> np.ndarray:
        return self._head.read(self._logits, self._inputs.num_outputs)

    def close(self) -> None:
        self.wait()
        if self.event_fd is not None:
            os.close(self.event_fd)
            self.event_fd = None

    def _submit(self, plan: CompiledPlan) -> None:
        inputs = self._inputs
        plan.native.submit(inputs.num_tokens, inputs.num_sequences, inputs.num_outputs, self.event_fd)
        self._submitted = plan


class TorchBackend:
    """The reference: every operation computed when it is called."""

    event_fd: int | None = None

    def __init__(self) -> None:
        from streamllm.ops.torch_ops import TorchOps

        self._ops = TorchOps()

    @property
    def ops(self) -> Ops:
        return self._ops

    def prepare(
        self,
        family: Family,
        model: Any,
        inputs: StepInputs,
        sampling: SamplingBuffers,
        sampled_vocab_size: int,
    ) -> None:
        self._family, self._model = family, model
        self._inputs, self._sampling = inputs, sampling
        self._sampled_vocab_size = sampled_vocab_size

    def submit_forward(self) -> None:
        self._hidden = self._family.forward(self._model, self.ops, self._inputs)

    def submit_sample(self) -> None:
        selected = self.ops.select_rows(self._hidden, self._inputs)
        self._logits = self._family.logits(self._model, self.ops, selected).numpy()
        sampler.sample(self._logits[:, : self._sampled_vocab_size], self._sampling)

    def wait(self) -> None:
        pass

    def logits(self) -> np.ndarray:
        return self._logits

    def close(self) -> None:
        pass


def load_model(
    family: Family,
    backend: Backend,
    checkpoint: Any,
    config: ModelConfig,
    progress: bool,
    weight_mode: WeightMode,
) -> Any:
    """Reads the weights into the backend's format."""
    loader = WeightLoader(checkpoint, backend.ops, progress=progress, weight_mode=weight_mode)
    try:
        return family.load_weights(loader, config)
    finally:
        loader.close()
