"""The library with CUDA's own runtime in it, as an install has it: that it loads and answers, GPU or not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers.cuda_compile import FLAGS, SOURCES, nvcc, nvcc_version

from streamllm import machine
from streamllm.ops.gpu.cuda.elementwise import CopyBlocksArgs
from streamllm.ops.gpu.cuda.library import CudaError, CudaLibrary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(nvcc() is None, reason="nvcc is not installed"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    path: Path = tmp_path_factory.mktemp("compiled") / "libstreamllm_cuda.so"
    sources = [str(SOURCES / name) for name in ("copy_blocks.cu", "library.cu")]
    hidden = ("-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden")
    subprocess.run(["nvcc", *FLAGS, "-arch=sm_90", "-shared", *hidden, "-o", path, *sources], check=True)
    return CudaLibrary(path)


def test_it_says_what_it_was_built_with(library):
    assert "{}.{}".format(*library.cuda_version) == nvcc_version()
    assert library.architectures == ("test",)


def test_arguments_are_refused_without_a_gpu(library):
    library.call("copy_blocks", CopyBlocksArgs())
    with pytest.raises(ValueError, match="a size or stride that the kernel does not support"):
        library.call("copy_blocks", CopyBlocksArgs(planes=1, num_pairs=-1, block_bytes=16))


@pytest.mark.skipif(bool(machine.gpus()), reason="there is a GPU")
def test_a_launch_without_a_gpu_says_what_cuda_says(library):
    with pytest.raises(CudaError, match=r"copy_blocks: .*(CUDA driver|CUDA-capable device)"):
        library.call("copy_blocks", CopyBlocksArgs(planes=1, num_pairs=1, block_bytes=16))
