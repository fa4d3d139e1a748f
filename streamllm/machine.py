"""What this machine gives to this process: cores, memory, NUMA nodes, GPUs. Linux says it in text files, the
driver of GPUs in a library.

Functions take the file system's root, so that a test can describe another machine. Where a file is
missing (another system, a locked-down container) the answer is the one that needs no special treatment.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path("/")
CUDA_DRIVER = "libcuda.so.1"
OLDEST_CAPABILITY = (8, 0)
"""Compute capability from which on GPUs are used."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA's driver shows to this process (``CUDA_VISIBLE_DEVICES`` limits them).

    Attributes:
        name: the driver's for it.
        compute_capability: e.g. ``(9, 0)``, whose code is called sm_90.
        memory: bytes.
    """

    name: str
    compute_capability: tuple[int, int]
    memory: int


def allowed_cpus() -> frozenset[int]:
    """CPUs that the process may be scheduled on (its affinity: ``taskset``, ``cpuset`` control groups)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def available_cores(root: Path = ROOT) -> int:
    """Cores that the process can keep busy: those it may run on, or its control groups' quota of CPU time in
    whole cores, rounded up, if that is less; at least 1."""
    quota = cpu_quota(root)
    cores = len(allowed_cpus())
    return cores if quota is None else max(min(cores, -int(-quota // 1)), 1)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU seconds per second that control groups (v2, else v1) grant, the tightest of the process's group and
    those above it; ``None``: no limit."""
    quotas = [*_quotas_v2(root), *_quotas_v1(root)]
    return min(quotas, default=None)


def total_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(root: Path = ROOT) -> int:
    """Bytes that the process can still take: free system memory, capped by what the limits of its control
    groups (v2 and v1) leave."""
    available = total_memory()
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    for mount, controller, limit_file, usage_file in (
        (group, "", "memory.max", "memory.current"),
        (group / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _group_folders(root, mount, controller):
            limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
            if limit.isdecimal() and usage.isdecimal():
                available = min(available, max(int(limit) - int(usage), 0))
    return available


def numa_nodes(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """The CPUs of every NUMA node that has memory; empty where the kernel does not say."""
    folder = root / "sys/devices/system/node"
    return {
        node: frozenset(parse_list(_read(folder / f"node{node}/cpulist")))
        for node in parse_list(_read(folder / "has_memory"))
    }


def memory_nodes(root: Path = ROOT) -> list[int]:
    """NUMA nodes on which the process may both run and take memory, ascending."""
    cpus = allowed_cpus()
    status = _read(root / "proc/self/status").splitlines()
    allowed = [line.partition(":")[2] for line in status if line.startswith("Mems_allowed_list:")]
    nodes = [node for node, node_cpus in numa_nodes(root).items() if node_cpus & cpus]
    return sorted(set(nodes) & set(parse_list(allowed[0]))) if allowed else sorted(nodes)


def huge_pages(root: Path = ROOT) -> str | None:
    """The kernel's setting for transparent huge pages of private memory: ``"always"``, ``"madvise"`` (used
    where a program asks, as this one does) or ``"never"``; ``None`` where there is no such setting."""
    words = _read(root / "sys/kernel/mm/transparent_hugepage/enabled").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def cpu_model(root: Path = ROOT) -> str | None:
    """The CPU's name as the kernel shows it."""
    return _cpu_field(root, "model name") or _cpu_field(root, "Hardware")


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Features of the CPU, by the kernel's names (``"avx2"``, ``"avx512_vnni"``)."""
    return frozenset((_cpu_field(root, "flags") or _cpu_field(root, "Features") or "").split())


def gpus(driver: str = CUDA_DRIVER) -> list[Gpu]:
    """GPUs in the driver's order; none without a driver, or if it does not work (a container without devices,
    a kernel module of another version)."""
    cuda = _initialized_driver(driver)
    count = ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_gpu(cuda, index) for index in range(count.value)]


@functools.cache
def gpu_is_usable() -> bool:
    """Whether there is a GPU with the capability that is needed, and a torch to use it with (which is not
    imported)."""
    found = gpus()
    return bool(found) and found[0].compute_capability >= OLDEST_CAPABILITY and has_cuda_torch()


def has_cuda_torch() -> bool:
    """Whether torch is installed, in a build that is not for CPUs alone."""
    try:
        return "+cpu" not in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False


def cuda_driver_version(driver: str = CUDA_DRIVER) -> tuple[int, int] | None:
    """The newest CUDA that the driver supports, e.g. ``(13, 0)``; ``None`` without a driver that works."""
    cuda = _initialized_driver(driver)
    version = ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def parse_list(text: str) -> list[int]:
    """The kernel's notation for sets of numbers: ``"0-2,5"`` is 0, 1, 2, 5."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdecimal():
            numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def _initialized_driver(driver: str) -> ctypes.CDLL | None:
    try:
        cuda = ctypes.CDLL(driver)
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    capability_major, capability_minor = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    memory = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = attribute(capability_major), attribute(capability_minor)
    return Gpu(name.value.decode(errors="replace"), capability, memory.value)


def _quotas_v2(root: Path) -> Iterator[float]:
    for folder in _group_folders(root, root / "sys/fs/cgroup", controller=""):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def _quotas_v1(root: Path) -> Iterator[float]:
    for folder in _group_folders(root, root / "sys/fs/cgroup/cpu", controller="cpu"):
        quota = _read(folder / "cpu.cfs_quota_us").strip()  # -1: no limit
        period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def _group_folders(root: Path, mount: Path, controller: str) -> Iterator[Path]:
    """The folders of the process's control group and of all groups above it.

    In a container the path that the kernel tells may be the host's: then only the mount itself exists.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.lstrip("/")
            while group != mount and mount in group.parents:
                yield group
                group = group.parent
    yield mount


def _cpu_field(root: Path, name: str) -> str | None:
    for line in _read(root / "proc/cpuinfo").splitlines():
        field, _, value = line.partition(":")
        if field.strip() == name:
            return value.strip()
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
