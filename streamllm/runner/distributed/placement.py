"""Which cores or which GPU each worker of this machine gets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from streamllm import machine
from streamllm.config import EngineConfig
from streamllm.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """
    Attributes:
        cpus: those that the worker may be scheduled on; ``None`` for all.
        threads: of its CPU kernels.
        environment: variables that its process has beside the engine's.
    """

    cpus: frozenset[int] | None
    threads: int
    environment: dict[str, str]


def place_workers(config: EngineConfig, root: Path = machine.ROOT) -> list[Placement]:
    """One placement a rank.

    Raises:
        ConfigError: there are fewer GPUs, or cores, than workers.
    """
    if config.resolved_backend == "cuda":
        return _on_gpus(config)
    return _on_cores(config, root)


def _on_gpus(config: EngineConfig) -> list[Placement]:
    gpus, count = machine.gpus(), config.world_size
    if count > max(len(gpus), 1):  # none at all is the loader's to explain
        raise ConfigError(
            f"{config.world_flags} needs {count} GPUs, and CUDA's driver shows {len(gpus)} here."
        )
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    names = visible or [str(index) for index in range(count)]
    return [Placement(None, 1, {"CUDA_VISIBLE_DEVICES": name}) for name in names[:count]]


def _on_cores(config: EngineConfig, root: Path) -> list[Placement]:
    count, cores = config.world_size, machine.available_cores(root)
    if count > cores:
        raise ConfigError(
            f"{config.world_flags} needs {count} cores, and this process may use {cores} (affinity and "
            "control group)."
        )
    placements = []
    for cpus in divide_cpus(sorted(machine.allowed_cpus()), count, root):
        threads = config.threads or max(min(len(cpus), cores // count), 1)
        # Libraries with threads of their own (torch's operations) have no more cores than the kernels.
        placements.append(Placement(frozenset(cpus), threads, {"OMP_NUM_THREADS": str(threads)}))
    return placements


def divide_cpus(cpus: Sequence[int], count: int, root: Path = machine.ROOT) -> list[list[int]]:
    """CPUs for each of ``count`` workers: whole NUMA nodes where there are as many, else near-even parts of
    all. Hardware threads of one core stay together where parts are large enough."""
    nodes = [sorted(node & set(cpus)) for node in machine.numa_nodes(root).values()]
    nodes = [node for node in nodes if node]
    if len(nodes) >= count > 1:
        return [sorted(cpu for node in part for cpu in node) for part in near_even(nodes, count)]
    node_of = {cpu: index for index, node in enumerate(nodes) for cpu in node}
    by_core = sorted(cpus, key=lambda cpu: (node_of.get(cpu, 0), _first_sibling(cpu, root), cpu))
    return [sorted(part) for part in near_even(by_core, count)]


def near_even(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """``count`` consecutive parts, whose lengths differ by at most one."""
    borders = [len(items) * index // count for index in range(count + 1)]
    return [items[first:end] for first, end in itertools.pairwise(borders)]


def _first_sibling(cpu: int, root: Path) -> int:
    """The first hardware thread of a CPU's core."""
    file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return min(machine.parse_list(file.read_text()), default=cpu)
    except OSError:
        return cpu
