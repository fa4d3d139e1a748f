"""Large memory: in huge pages where the kernel allows them, spread over NUMA nodes where there are several.

Any thread may read any weight and any KV block. By first touch all weights would lie on the node of the
thread that loads them; spread evenly, every thread finds the same mix of near and far memory, and all memory
controllers work.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from streamllm.ops.instruction_set import native_module


def spread_over_nodes(nodes: Sequence[int]) -> bool:
    """Interleave the pages of weights and KV caches made from now on over these NUMA nodes; with fewer than
    two, pages lie where they are touched first.

    Returns:
        Whether the kernel lets us: a container's seccomp profile may forbid the system call (``mbind``).
    """
    return native_module().interleave_memory_over(list(nodes) if len(nodes) > 1 else [])


def map_memory(num_bytes: int) -> mmap.mmap:
    """Private memory, page-aligned, zeroed; pages that are not touched take none.

    Raises:
        OSError, ValueError, OverflowError: the system does not have so much.
    """
    # Kernels seldom back shared mappings, which are mmap's default, with huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    native_module().place_memory(np.frombuffer(memory, np.uint8).ctypes.data, num_bytes)
    return memory
