"""The tests of the CUDA kernels once more, built with AddressSanitizer and UndefinedBehaviorSanitizer.

They see accesses outside of arrays, of shared memory and of local variables, misaligned accesses, overflows
of signed integers and of conversions. What they cannot see: a read of memory that nobody has written (tests
fill outputs and unused slots with NaN for it), overruns from one array into another or inside one, and what
``test_cuda_emulation.py`` lists.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import cuda_emulation

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
OF_TOOLS = {f"test_cuda_{name}.py" for name in ("build", "compile", "emulation", "library", "sanitizers")}
LONG = {"test_cuda_attention.py", "test_cuda_rotary_cache.py"}
"""What takes long to compile or to run with sanitizers: with the slow tests only."""
KERNEL_TESTS = sorted(path.name for path in HERE.glob("test_cuda_*.py") if path.name not in OF_TOOLS)


def run_sanitized(name: str, *options: str) -> None:
    if reason := cuda_emulation.missing():
        pytest.skip(f"CUDA kernels cannot be emulated: {reason}")
    # -s: what a sanitizer prints as it ends the process must not end in pytest's own files.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options, str(HERE / name)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | cuda_emulation.sanitizer_environment(),
    )
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip("there are none")
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


@pytest.mark.parametrize("name", [name for name in KERNEL_TESTS if name not in LONG])
def test_kernels_sanitized(name):
    run_sanitized(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNEL_TESTS)
def test_kernels_sanitized_in_all_tests(name):
    run_sanitized(name, "-m", "slow or not slow")
