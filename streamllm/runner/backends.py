"""How a step's two phases run: as recorded native plans, or eagerly on torch."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import Family
from streamllm.models.weights import WeightLoader, WeightMode
from streamllm.ops import Ops
from streamllm.ops.cpu_plan import CompiledPlan, CpuOps, PlanBuffer
from streamllm.ops.step_inputs import SamplingBuffers, StepInputs
from streamllm.runner import sampler


class Backend(Protocol):
    """Runs the forward, then logits and sampling, over buffers that were given once.

    Logits and sampling are one phase, or two where something must see the logits in between.

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

    def hidden(self) -> np.ndarray:
        """Hidden states of the last forward, float32 ``[tokens, hidden_size]``; a view that the next one
        changes."""

    def submit_sample(self) -> None:
        """Logits of the output rows, and a token drawn from each."""

    def submit_logits(self) -> None:
        """Logits of the output rows alone; :meth:`logits` shows them when they are there."""

    def submit_draw(self) -> None:
        """A token drawn from each row of the logits that :meth:`submit_logits` computed."""

    def wait(self) -> None:
        """Blocks until the submitted phase is done; takes its signal from ``event_fd``."""

    def logits(self) -> np.ndarray:
        """The last step's logits, float32 ``[outputs, vocab_size]``; a view that the next step changes."""

    def close(self) -> None: ...


class PlanBackend:
    """Native plans: one for the forward, one for logits and sampling; two more, recorded when they are first
    needed, for logits alone and for sampling alone."""

    def __init__(self, *, threads: int, max_tokens: int, max_outputs: int):
        self._ops = CpuOps(threads=threads, max_tokens=max_tokens, max_outputs=max_outputs)
        self.event_fd: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self._submitted: CompiledPlan | None = None
        self._logits_plan: CompiledPlan | None = None

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
        self._forward, self._hidden = ops.compile(keep=[hidden]), hidden

        def record_logits() -> PlanBuffer:
            return family.logits(model, ops, ops.select_rows(hidden, inputs))

        def record_draw(logits: PlanBuffer) -> None:
            ops.sample(logits, sampled_vocab_size, sampling)

        self._record_logits, self._record_draw = record_logits, record_draw
        self._logits = record_logits()
        record_draw(self._logits)
        self._head = ops.compile(keep=[self._logits])
        self._logits_of = (self._head, self._logits)

    def submit_forward(self) -> None:
        self._submit(self._forward)

    def hidden(self) -> np.ndarray:
        return self._forward.read(self._hidden, self._inputs.num_tokens)

    def submit_sample(self) -> None:
        self._logits_of = (self._head, self._logits)
        self._submit(self._head)

    def submit_logits(self) -> None:
        if self._logits_plan is None:
            self._lone_logits = self._record_logits()
            self._logits_plan = self._ops.compile(keep=[self._lone_logits])
            self._record_draw(self._lone_logits)
            self._draw_plan = self._ops.compile()
        self._logits_of = (self._logits_plan, self._lone_logits)
        self._submit(self._logits_plan)

    def submit_draw(self) -> None:
        self._submit(self._draw_plan)

    def wait(self) -> None:
        if self._submitted is not None and self.event_fd is not None:
            os.eventfd_read(self.event_fd)
            self._submitted.native.wait()
            self._submitted = None

    def logits(self) -> np.ndarray:
        plan, buffer = self._logits_of
        return plan.read(buffer, self._inputs.num_outputs)

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

    def hidden(self) -> np.ndarray:
        return self._hidden.numpy()

    def submit_sample(self) -> None:
        self.submit_logits()
        self.submit_draw()

    def submit_logits(self) -> None:
        selected = self.ops.select_rows(self._hidden, self._inputs)
        self._logits = self._family.logits(self._model, self.ops, selected).numpy()

    def submit_draw(self) -> None:
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
