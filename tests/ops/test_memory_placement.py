"""Huge pages and NUMA policy, as the kernel reports them of this process."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from streamllm import _native, machine
from streamllm.ops.kv_cache import KVCache
from streamllm.ops.memory import map_memory, spread_over_nodes

MIB = 2**20
NUM_BYTES = 16 * MIB

needs_huge_pages = pytest.mark.skipif(
    machine.huge_pages() in (None, "never"), reason="this kernel allows no huge pages"
)
needs_numa = pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel knows no NUMA")


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that holds ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the address is not mapped")


def policy(address: int) -> str:
    """The NUMA policy of the mapping that holds ``address``."""
    lines = (line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines())
    return max((int(start, 16), rest[0]) for start, *rest in lines if int(start, 16) <= address)[1]


def touched(num_bytes: int) -> np.ndarray:
    memory = np.frombuffer(map_memory(num_bytes), np.uint8)
    memory[:] = 1
    return memory


@needs_huge_pages
def test_large_memory_lies_in_huge_pages():
    memory = touched(NUM_BYTES)
    # Its ends may not be aligned; and under pressure the kernel may not find one for each.
    assert huge_bytes(memory.ctypes.data + NUM_BYTES // 2) >= NUM_BYTES // 4


@needs_huge_pages
def test_the_kv_cache_lies_in_huge_pages():
    cache = KVCache(
        layers_per_block=1, num_blocks=256, block_size=16, num_kv_heads=4, head_dim=128,
        kv_cache_dtype="float32",
    )  # fmt: skip
    assert cache.num_bytes == NUM_BYTES
    cache.planes[:] = 1
    assert huge_bytes(cache.planes.ctypes.data + NUM_BYTES // 2) >= NUM_BYTES // 4


@needs_huge_pages
def test_weights_lie_in_huge_pages():
    def total() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))

    before = total()
    weight = np.zeros((NUM_BYTES // 4096, 1024), np.float32)
    weight_huge = total() - before  # numpy may ask for them too
    matrix = _native.PackedMatrix(1024)
    matrix.append_rows("float32", weight.ctypes.data, weight.shape[0], weight.strides[0])
    assert matrix.num_bytes == NUM_BYTES
    assert total() - before - weight_huge >= NUM_BYTES // 4


@needs_numa
def test_memory_is_interleaved_over_the_nodes_named():
    (node, *_) = machine.memory_nodes()
    if not _native.interleave_memory_over([node]):
        pytest.skip("this container forbids mbind")
    try:
        memory = touched(NUM_BYTES)
        assert policy(memory.ctypes.data) == f"interleave:{node}"
    finally:
        _native.interleave_memory_over([])
    assert policy(touched(NUM_BYTES).ctypes.data) == "default"


@needs_numa
@pytest.mark.parametrize("nodes", [[], [0]])
def test_one_node_or_none_leaves_memory_to_first_touch(nodes):
    assert spread_over_nodes(nodes)
    assert policy(touched(NUM_BYTES).ctypes.data) == "default"


@needs_numa
def test_nodes_that_do_not_exist_are_refused_and_change_nothing():
    assert not spread_over_nodes([900, 901])
    assert policy(touched(MIB).ctypes.data) == "default"
    with pytest.raises(ValueError, match="-1"):
        spread_over_nodes([0, -1])
