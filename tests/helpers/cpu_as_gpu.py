"""The GPU's path on a CPU: its backend over the reference kernels, a recorder in the place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streamllm.engine.gpu_loader import GpuTarget
from streamllm.models.model_config import ModelConfig
from streamllm.ops.gpu.kernels import GpuKernels
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.runner.backends import load_model
from streamllm.runner.gpu_backend import GpuBackend
from streamllm.runner.model_runner import ModelRunner

CPU = torch.device("cpu")
GIB = 2**30


class ReplayRecorder:
    """Notes operations and repeats them on the same tensors, as a graph does.

    Attributes:
        num_replays: pieces that were replayed so far.
    """

    def __init__(self) -> None:
        self.num_replays = 0

    def begin(self) -> None:
        self._operations: list[Callable[[], Any]] = []

    def launch(self, operation: Callable[[], Any]) -> None:
        operation()
        self._operations.append(operation)

    def end(self) -> Callable[[], None]:
        operations = self._operations

        def replay() -> None:
            self.num_replays += 1
            for operation in operations:
                operation()

        return replay

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class FixedMemory:
    """Memory of a device that nobody else uses, and on which a step takes ``step_bytes``."""

    def __init__(self, total: int = 4 * GIB, free: int | None = None, step_bytes: int = GIB):
        self._total, self._free, self._step_bytes = total, free, step_bytes

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._total if self._free is None else self._free

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return self._step_bytes


def cpu_target(
    kernels: GpuKernels | None = None, *, graphs: bool = False, memory: FixedMemory | None = None
) -> GpuTarget:
    """What :func:`streamllm.engine.gpu_loader.find_gpu` would find."""
    return GpuTarget(
        "a test's GPU",
        CPU,
        kernels or ReferenceKernels(),
        memory or FixedMemory(),
        ReplayRecorder() if graphs else None,
    )


def new_runner(
    config: ModelConfig,
    checkpoint: Any,
    *,
    backend: str = "cpu",
    kernels: GpuKernels | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> ModelRunner:
    """A :class:`ModelRunner` of any backend.

    Args:
        backend: ``"cpu"``, ``"torch"``, or ``"gpu"`` and ``"gpu-graphs"``: the GPU's, on the CPU.
        kernels: of the last two; by default the reference's.
        dtype: of their activations and weights.
    """
    if not backend.startswith("gpu"):
        return ModelRunner(config, checkpoint, backend=backend, **settings)
    recorder = ReplayRecorder() if backend == "gpu-graphs" else None
    made = GpuBackend(
        kernels or ReferenceKernels(), CPU, dtype, lora=settings.pop("lora", None), recorder=recorder
    )
    loaded = load_model(config, made, checkpoint, False, settings.get("weight_mode", "float32"))
    return ModelRunner(config, checkpoint, **settings, loaded=loaded)
