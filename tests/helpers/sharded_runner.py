"""Model runners that each have one rank's part of a model, as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from helpers.cpu_as_gpu import CPU, ReplayRecorder
from helpers.thread_collectives import ThreadCollectives, run_ranks

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.parallel_family import Parallel
from streamllm.models.sharding_plan import make_sharding_plan
from streamllm.models.weights import WeightMode
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.ops.lora import LoraLimits
from streamllm.runner.backends import Backend, PlanBackend, TorchBackend, load_model
from streamllm.runner.gpu_backend import GpuBackend
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

T = TypeVar("T")

SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 64,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "kv_cache_dtype": "float32",
    "max_model_len": 256,
    "threads": 1,
    "progress": False,
}


def files_of(path: Path) -> ModelFiles:
    kind = "gguf" if path.suffix == ".gguf" else "folder"
    return ModelFiles(name=path.name, served_name=path.name, kind=kind, path=path)


def make_backend(backend: str, lora: LoraLimits | None = None) -> Backend:
    """
    Args:
        backend: ``"cpu"``, ``"torch"``, or ``"gpu"`` and ``"gpu-graphs"``: the GPU's, on the CPU.
    """
    if backend == "torch":
        return TorchBackend(lora)
    if backend == "cpu":
        return PlanBackend(threads=1, max_tokens=128, max_outputs=256, lora=lora)
    recorder = ReplayRecorder() if backend == "gpu-graphs" else None
    return GpuBackend(ReferenceKernels(), CPU, torch.float32, lora=lora, recorder=recorder)


def load_rank(
    path: Path,
    collectives: ThreadCollectives | None = None,
    *,
    backend: str = "cpu",
    weight_mode: WeightMode = "float32",
    lora: LoraLimits | None = None,
) -> ModelRunner:
    """A runner with a rank's part of the model in a folder or GGUF, or with all of it."""
    files = files_of(path)
    config = ModelConfig.from_files(files)
    checkpoint = open_checkpoint(files, config)
    parallel = None
    if collectives is not None:
        parallel = Parallel(collectives.rank, collectives.size, collectives)
    loaded = load_model(config, make_backend(backend, lora), checkpoint, False, weight_mode, parallel)
    if parallel is not None:
        plan = make_sharding_plan(config, checkpoint.format, rank=parallel.rank, size=parallel.size)
        config = plan.local_config(config)
    return ModelRunner(config, checkpoint, loaded=loaded, **SETTINGS)


def on_ranks(path: Path, size: int, use: Callable[[ModelRunner, int], T], **changes: Any) -> list[T]:
    """What ``use`` makes of each rank's runner, all at once."""

    def run(collectives: ThreadCollectives) -> T:
        runner = load_rank(path, collectives, **changes)
        result = use(runner, collectives.rank)
        runner.close()
        return result

    return run_ranks(size, run)
