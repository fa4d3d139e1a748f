from __future__ import annotations

import subprocess
import sys

import pytest

POOLS = """
from streamllm import _native

for _ in range(300_000):
    _native.ThreadPool(3)
"""


@pytest.mark.slow
def test_a_pool_ends_whatever_its_workers_are_at():
    """A worker that looked for the end just before it came, and then slept on the count that told of it,
    slept for ever: one pool of some hundred thousand, where there are more threads than cores."""
    processes = [subprocess.Popen([sys.executable, "-c", POOLS]) for _ in range(4)]
    try:
        for process in processes:
            assert process.wait(timeout=300) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
