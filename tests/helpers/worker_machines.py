"""Machines that tests describe, as the kernel would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def describe_cpus(root: Path, *, nodes: Sequence[str], siblings: Mapping[int, str]) -> None:
    """Writes the kernel's files about NUMA nodes and cores.

    Args:
        nodes: the CPUs of each node, in the kernel's notation.
        siblings: for each CPU the hardware threads of its core.
    """
    folder = root / "sys/devices/system"
    for index, cpus in enumerate(nodes):
        (folder / f"node/node{index}").mkdir(parents=True)
        (folder / f"node/node{index}/cpulist").write_text(f"{cpus}\n")
    (folder / "node/has_memory").write_text(f"0-{len(nodes) - 1}\n")
    for cpu, threads in siblings.items():
        (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{threads}\n")
