"""That the emulation of CUDA finds what it is there to find, and leaves right kernels alone.

What it cannot see, and only a GPU shows: how accesses coalesce, bank conflicts and every other matter of
speed; what depends on the order of blocks that run at once (here one ends before the next begins) or of warps
between two barriers, beyond what some order of whole threads shows; weak memory ordering; the matrix units'
own order of summation and the rounding of fast intrinsics; registers, occupancy and what the compiler makes
of the source (``test_cuda_compile.py`` sees some of it); Hopper's bulk copies, clusters, and everything of
CUDA that ``csrc/cuda/emulation/runtime.hpp`` does not name.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from helpers import cuda_emulation
from helpers.cuda_emulation import SANITIZED, address, emulated, sanitizer_environment

FAULTY_KERNELS = Path(__file__).with_name("faulty_kernels.cu")
THREADS, BLOCKS = 64, 3
OPERATIONS = ("reverse", "upper_sum", "copy")


class Fault(IntEnum):
    NONE = 0
    GLOBAL_OVERRUN = 1
    SHARED_OVERRUN = 2
    MISSING_BARRIER = 3
    MISSING_LANE = 4
    DIVERGENT_BARRIER = 5
    MISALIGNED_16 = 6
    READ_BEFORE_WAIT = 7
    RETURNED_LANE = 8
    MISSING_WARP_BARRIER = 9
    FOREIGN_MASK = 10


class FaultArgs(ctypes.Structure):
    _fields_ = [
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("blocks", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("fault", ctypes.c_int32),
    ]


def run(operation: str, fault: Fault = Fault.NONE, seed: int = 0, threads: int = THREADS) -> np.ndarray:
    out, _ = run_and_count(operation, fault, seed, threads)
    return out


def run_and_count(
    operation: str, fault: Fault, seed: int, threads: int
) -> tuple[np.ndarray, tuple[int, int]]:
    """The output, and the bytes that were loaded and stored."""
    library = emulated(str(FAULTY_KERNELS))
    library.set_seed(seed)
    x = np.random.default_rng(7).standard_normal(BLOCKS * threads, np.float32)
    out = np.full_like(x, np.nan)
    library.call(operation, FaultArgs(address(out), address(x), BLOCKS, threads, fault))
    return out, library.take_traffic()


def run_in_a_process(operation: str, fault: Fault, sanitized: bool = False) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(SANITIZED, None)
    if sanitized:
        environment |= sanitizer_environment()
    command = [sys.executable, __file__, operation, fault.name]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_right_kernels_give_the_same_bits_in_every_order(operation):
    x = np.random.default_rng(7).standard_normal(BLOCKS * THREADS, np.float32)
    expected = run(operation)
    if operation == "copy":
        np.testing.assert_array_equal(expected, x)
    if operation == "reverse":
        np.testing.assert_array_equal(expected, x.reshape(BLOCKS, THREADS)[:, ::-1].ravel())
    if operation == "upper_sum":
        lanes = x.reshape(-1, 2, 16).astype(np.float64)
        lanes[:, 0], lanes[:, 1] = 0, lanes[:, 1].sum(1, keepdims=True)
        np.testing.assert_allclose(expected, lanes.ravel(), rtol=1e-5, atol=1e-6)
    for seed in range(1, 11):
        assert run(operation, seed=seed).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "operation, fault",
    [
        ("reverse", Fault.MISSING_BARRIER),
        ("copy", Fault.MISSING_WARP_BARRIER),
        ("copy", Fault.READ_BEFORE_WAIT),
    ],
)
def test_a_missing_barrier_changes_results_from_order_to_order(operation, fault):
    expected = run(operation)
    wrong = [seed for seed in range(10) if run(operation, fault, seed).tobytes() != expected.tobytes()]
    assert len(wrong) >= 9  # ascending order alone may hide it


@pytest.mark.parametrize(
    "operation, fault, messages",
    [
        ("reverse", Fault.SHARED_OVERRUN, ["past the end of 256 bytes of shared memory"]),
        ("reverse", Fault.DIVERGENT_BARRIER, ["divergent barrier: thread (0, 0, 0) is in __syncthreads at"]),
        (
            "upper_sum",
            Fault.MISSING_LANE,
            ["threads wait for threads that do not come", "thread (17, 0, 0) and "],
        ),
        ("upper_sum", Fault.RETURNED_LANE, ["__shfl_xor_sync with mask 0xffff0000", "thread (20, 0, 0)"]),
        ("upper_sum", Fault.FOREIGN_MASK, ["0x0000ffff, which leaves out its own lane", "thread ("]),
        ("copy", Fault.MISALIGNED_16, ["asynchronous copy from of 16 bytes at"]),
    ],
)
def test_a_fault_ends_the_process_and_says_where(operation, fault, messages):
    done = run_in_a_process(operation, fault)
    assert done.returncode < 0
    for message in [*messages, f"{operation}_kernel", "block ("]:
        assert message in done.stderr


@pytest.mark.parametrize(
    "fault, message",
    [
        (Fault.GLOBAL_OVERRUN, "READ of size 4"),
        (Fault.SHARED_OVERRUN, "WRITE of size 4"),
    ],
)
def test_the_sanitizer_sees_the_first_byte_past_an_array(fault, message):
    done = run_in_a_process("reverse", fault, sanitized=True)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert message in done.stderr
    assert "reverse_kernel" in done.stderr
    assert "faulty_kernels.cu" in done.stderr


def test_the_sanitizer_has_nothing_against_right_kernels():
    for operation in OPERATIONS:
        done = run_in_a_process(operation, Fault.NONE, sanitized=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [0, 1025])
def test_a_block_that_no_gpu_takes_is_an_error(threads):
    with pytest.raises(RuntimeError, match="reverse: invalid configuration argument"):
        run("reverse", threads=threads)


def test_the_whole_block_of_1024_threads_runs():
    assert not np.isnan(run("reverse", threads=1024)).any()


def test_bytes_of_global_memory_are_counted():
    _, traffic = run_and_count("copy", Fault.NONE, seed=3, threads=THREADS)
    assert traffic == (BLOCKS * THREADS * 4, 0)


if __name__ == "__main__":
    if reason := cuda_emulation.missing():
        sys.exit(reason)
    run(sys.argv[1], Fault[sys.argv[2]], seed=5)
