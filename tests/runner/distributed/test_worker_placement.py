"""Which cores each worker gets, told of machines that tests describe."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.worker_machines import describe_cpus

from streamllm import machine
from streamllm.config import EngineConfig
from streamllm.errors import ConfigError
from streamllm.machine import Gpu
from streamllm.runner.distributed.placement import divide_cpus, place_workers


def test_whole_nodes_where_there_are_as_many(tmp_path):
    describe_cpus(tmp_path, nodes=["0-3,8-11", "4-7,12-15"], siblings={})
    assert divide_cpus(range(16), 2, tmp_path) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    # The process may use more of the one than of the other: borders of nodes stay borders of workers.
    assert divide_cpus([0, 1, 2, 3, 8, 9, 10, 4], 2, tmp_path) == [[0, 1, 2, 3, 8, 9, 10], [4]]


def test_a_node_is_divided_where_workers_are_more(tmp_path):
    describe_cpus(tmp_path, nodes=["0-3", "4-7"], siblings={})
    assert divide_cpus(range(8), 4, tmp_path) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_hardware_threads_of_a_core_stay_together(tmp_path):
    describe_cpus(tmp_path, nodes=["0-7"], siblings={cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert divide_cpus(range(8), 2, tmp_path) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_machine_that_says_nothing_is_divided_all_the_same(tmp_path):
    assert divide_cpus([3, 5, 6], 2, tmp_path) == [[3], [5, 6]]


def test_a_quota_of_time_limits_the_threads_and_not_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: frozenset(range(8)))
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("400000 100000\n")
    config = EngineConfig(tensor_parallel_size=2, backend="cpu")
    found = place_workers(config, tmp_path)
    assert [(sorted(each.cpus), each.threads) for each in found] == [([0, 1, 2, 3], 2), ([4, 5, 6, 7], 2)]
    own = place_workers(EngineConfig(tensor_parallel_size=2, threads=3, backend="cpu"), tmp_path)
    assert [each.threads for each in own] == [3, 3]


def test_more_workers_than_cores_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(machine, "allowed_cpus", lambda: frozenset(range(3)))
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4 needs .* cores, .* 3 "):
        place_workers(EngineConfig(tensor_parallel_size=4, backend="cpu"), Path("/nowhere"))


def test_a_gpu_each_of_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu("H100", (9, 0), 80 << 30)] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5f")
    config = EngineConfig(tensor_parallel_size=2, backend="cuda")
    names = [each.environment["CUDA_VISIBLE_DEVICES"] for each in place_workers(config)]
    assert names == ["3", "GPU-5f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    names = [each.environment["CUDA_VISIBLE_DEVICES"] for each in place_workers(config)]
    assert names == ["0", "1"]
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 needs .* GPUs, .* 2 "):
        place_workers(EngineConfig(tensor_parallel_size=3, backend="cuda"))
