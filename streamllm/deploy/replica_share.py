"""What of a cluster one replica takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """What Ray reserves for a replica.

    Attributes:
        num_cpus, num_gpus: for the replica's process and the workers that it starts itself.
        threads: of the CPU kernels of each process; ``None`` where a GPU runs the model.
    """

    num_cpus: int
    num_gpus: int
    threads: int | None


def replica_share(
    engine: Mapping[str, Any], resources: Mapping[str, float], *, replicas: int, most_replicas: int
) -> ReplicaShare:
    """An equal part of the cluster's cores, or as many cores or GPUs as the settings ask for.

    Args:
        engine: settings of :class:`streamllm.config.EngineConfig`, those that were given.
        resources: of the cluster, ``{"CPU": 8.0, "GPU": 1.0}``.
        replicas, most_replicas: that there are to be, and that there may be.

    Raises:
        ConfigError: the cluster has too few for ``replicas``.
    """
    num_workers = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    backend = engine.get("backend", "auto")
    on_gpu = backend == "cuda" or (backend == "auto" and resources.get("GPU", 0) >= 1)
    if engine.get("distributed_executor_backend") == "ray":
        return ReplicaShare(0, 0, engine.get("threads"))  # its workers are placed by themselves
    if on_gpu:
        _check_enough(replicas, num_workers, int(resources.get("GPU", 0)), "GPU")
        return ReplicaShare(0, num_workers, None)
    cores = int(resources.get("CPU", 0))
    threads = engine.get("threads") or max(1, cores // (most_replicas * num_workers))
    _check_enough(replicas, threads * num_workers, cores, "core")
    return ReplicaShare(threads * num_workers, 0, threads)


def _check_enough(replicas: int, each: int, there_are: int, what: str) -> None:
    if replicas * each > there_are:
        needed = f"{replicas} of {each}" if each > 1 else str(replicas)
        raise ConfigError(
            f"--replicas {replicas} needs {needed} {what}s, and the cluster has {there_are}; use fewer "
            f"replicas{', or fewer --threads' if what == 'core' and each > 1 else ''}."
        )
