from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.cuda_driver import build_driver

from streamllm import machine


def describe(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def on_cpus(monkeypatch):
    def allow(*cpus: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))

    return allow


V2 = {"proc/self/cgroup": "0::/pod/app\n"}
V1 = {"proc/self/cgroup": "4:memory:/pod\n3:cpu,cpuacct:/pod/app\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        (V2 | {"sys/fs/cgroup/pod/app/cpu.max": "max 100000\n"}, 8),
        (V2 | {"sys/fs/cgroup/pod/app/cpu.max": "250000 100000\n"}, 3),
        (V2 | {"sys/fs/cgroup/pod/app/cpu.max": "5000 100000\n"}, 1),
        (V2 | {"sys/fs/cgroup/pod/app/cpu.max": "6400000 100000\n"}, 8),
        # The tightest limit on the way up counts.
        (
            V2
            | {
                "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/pod/app/cpu.max": "400000 100000\n",
            },
            2,
        ),
        # A container that sees its own group as the root, under the host's path.
        ({"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/pod/app/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/pod/app/cpu.cfs_period_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_cores_are_those_of_affinity_and_control_groups(tmp_path, on_cpus, files, cores):
    on_cpus(*range(8))
    assert machine.available_cores(describe(tmp_path, files)) == cores


def test_affinity_limits_cores_below_the_quota(tmp_path, on_cpus):
    on_cpus(2, 5)
    assert machine.available_cores(describe(tmp_path, V2 | {"sys/fs/cgroup/cpu.max": "400000 100000"})) == 2


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"}
V1_MEMORY = "sys/fs/cgroup/memory/pod/memory."


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (MEMINFO, 8000 * 1024),
        (MEMINFO | {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}, 8000 * 1024),
        (
            MEMINFO
            | V2
            | {"sys/fs/cgroup/pod/memory.max": "1000\n", "sys/fs/cgroup/pod/memory.current": "300\n"},
            700,
        ),
        (
            MEMINFO | V1 | {f"{V1_MEMORY}limit_in_bytes": "1000\n", f"{V1_MEMORY}usage_in_bytes": "1300\n"},
            0,
        ),
    ],
)
def test_available_memory_is_what_system_and_control_groups_leave(tmp_path, files, available):
    assert machine.available_memory(describe(tmp_path, files)) == available


TWO_NODES = {
    "sys/devices/system/node/has_memory": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    "proc/self/status": "Name:\tx\nMems_allowed_list:\t0-1\n",
}


@pytest.mark.parametrize(
    ("cpus", "files", "nodes"),
    [
        (range(8), TWO_NODES, [0, 1]),
        (range(4, 8), TWO_NODES, [1]),
        (range(8), TWO_NODES | {"proc/self/status": "Mems_allowed_list:\t1\n"}, [1]),
        (range(8), {}, []),
    ],
)
def test_memory_nodes_are_those_where_the_process_runs_and_may_take_memory(
    tmp_path, on_cpus, cpus, files, nodes
):
    on_cpus(*cpus)
    assert machine.memory_nodes(describe(tmp_path, files)) == nodes


def test_the_kernels_lists_of_numbers():
    assert machine.parse_list("0-2,5,7-7\n") == [0, 1, 2, 5, 7]
    assert machine.parse_list("") == machine.parse_list("(null)\n") == []


def test_huge_pages_and_cpu_by_the_kernels_files(tmp_path):
    root = describe(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "proc/cpuinfo": "model name\t: A CPU\nflags\t\t: sse2 avx2\n",
        },
    )
    assert machine.huge_pages(root) == "madvise"
    assert machine.cpu_model(root) == "A CPU"
    assert machine.cpu_flags(root) == {"sse2", "avx2"}


def test_a_machine_that_says_nothing_needs_no_special_treatment(tmp_path):
    assert machine.cpu_quota(tmp_path) is machine.huge_pages(tmp_path) is machine.cpu_model(tmp_path) is None
    assert machine.numa_nodes(tmp_path) == {} and machine.cpu_flags(tmp_path) == frozenset()


def test_this_machine():
    assert 1 <= machine.available_cores() <= (os.cpu_count() or 1)
    assert 100 * 2**20 < machine.available_memory() <= machine.total_memory()
    assert set(machine.memory_nodes()) <= set(machine.numa_nodes())


H100 = machine.Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000)
L40 = machine.Gpu("NVIDIA L40", (8, 9), 48_000_000_000)


def test_gpus_are_what_the_driver_shows(tmp_path):
    driver = str(build_driver(tmp_path, H100, L40, version=(12, 8)))
    assert machine.gpus(driver) == [H100, L40]
    assert machine.cuda_driver_version(driver) == (12, 8)


def test_without_a_driver_that_works_there_are_no_gpus(tmp_path):
    broken = str(build_driver(tmp_path, H100, status=999))
    for driver in (broken, str(tmp_path / "libmissing.so")):
        assert machine.gpus(driver) == []
        assert machine.cuda_driver_version(driver) is None
