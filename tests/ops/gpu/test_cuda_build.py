"""What the install makes of a machine: builds CUDA kernels, or says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cuda_compile import nvcc
from helpers.cuda_driver import build_driver

from streamllm.machine import Gpu

CUDA_SOURCES = Path(__file__).parents[3] / "csrc" / "cuda"
L40 = Gpu("NVIDIA L40", (8, 9), 2**35)
H200 = Gpu("NVIDIA H200", (9, 0), 2**37)
PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(kernels LANGUAGES CXX)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
add_subdirectory("{sources}" cuda)
"""

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


class Configured:
    """A project with the kernels alone, configured on a machine with these GPUs."""

    def __init__(self, folder: Path, *gpus: Gpu, **environment: str):
        (folder / "CMakeLists.txt").write_text(PROJECT.format(sources=CUDA_SOURCES))
        build_driver(folder, *gpus, status=0 if gpus else 100)
        unset = ("STREAMLLM_CUDA", "STREAMLLM_CUDA_ARCHITECTURES", "CUDACXX")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        command = ["cmake", "-S", folder, "-B", folder / "build", f"-DPython_EXECUTABLE={sys.executable}"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=inherited | {"LD_LIBRARY_PATH": str(folder)} | environment,
        )
        self.succeeded, self.text = done.returncode == 0, done.stdout + done.stderr
        reason = folder / "build" / "cuda" / "cuda_not_built.txt"
        self.why_not = reason.read_text().strip() if reason.exists() else None
        self.asked_for_a_compiler = "CUDA compiler" in done.stdout


def test_without_a_gpu_nothing_is_built_nor_looked_for(tmp_path):
    configured = Configured(tmp_path)
    assert configured.succeeded
    assert configured.why_not == "no GPU was found at install"
    assert not configured.asked_for_a_compiler


def test_it_can_be_switched_off(tmp_path):
    configured = Configured(tmp_path, H200, STREAMLLM_CUDA="0")
    assert configured.succeeded
    assert configured.why_not == "STREAMLLM_CUDA=0 at install"


def test_without_a_compiler_the_install_succeeds(tmp_path):
    configured = Configured(tmp_path, H200, CUDACXX="/bin/false")
    assert configured.succeeded
    assert configured.why_not == "no CUDA compiler (nvcc) that works was found at install"


def test_with_a_compiler_that_does_not_work_the_install_succeeds(tmp_path):
    """As a distribution's nvcc that refuses the machine's g++."""
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    configured = Configured(tmp_path, H200, PATH=f"{compiler.parent}:{os.environ['PATH']}")
    assert configured.succeeded, configured.text
    assert configured.why_not == "no CUDA compiler (nvcc) that works was found at install"


def test_without_a_compiler_asking_for_it_fails(tmp_path):
    configured = Configured(tmp_path, STREAMLLM_CUDA="1", CUDACXX="/bin/false")
    assert not configured.succeeded
    assert "STREAMLLM_CUDA=1 needs a CUDA compiler (nvcc)" in configured.text


@pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("gpus", "environment", "architectures"),
    [
        ([H200, L40, H200], {}, "89,90"),
        pytest.param([], {"STREAMLLM_CUDA": "1"}, "80-real,90-real,100", marks=pytest.mark.slow),
        pytest.param(
            [H200], {"STREAMLLM_CUDA_ARCHITECTURES": "80-real;100"}, "80-real,100", marks=pytest.mark.slow
        ),
    ],
)
def test_it_is_built_for_the_gpus_that_are_there(tmp_path, gpus, environment, architectures):
    configured = Configured(tmp_path, *gpus, **environment)
    assert configured.succeeded, configured.text
    assert configured.why_not is None
    assert f"CUDA kernels are built for {architectures}\n" in configured.text
