"""Whole models on the CUDA kernels, emulated, and on Triton's, interpreted: tokens as on the CPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cuda_emulation import emulated
from helpers.drive import GREEDY, generate
from helpers.random_runner import make_runner
from helpers.tiny_models import make_tiny_model

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.ops.gpu.cuda_kernels import CudaKernels
from streamllm.ops.gpu.kernels import GpuKernels
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.sampling_params import SamplingParams
from streamllm.sources import resolve

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3, 4, 5], [7] * 40, [9]]
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=4),
    SamplingParams(temperature=0.7, seed=4, top_k=7),
]
TESTS = Path(__file__).parents[1]


class EmulatedKernels(CudaKernels):
    """Prompts' attention, which is Triton's, comes from the reference."""

    def paged_prefill(self, *args) -> None:
        ReferenceKernels().paged_prefill(*args)


def check(kernels: GpuKernels, backend: str) -> None:
    expected = generate(make_runner(), PROMPTS, params=PARAMS, max_tokens=5, budget=21)
    runner = make_runner(backend=backend, kernels=kernels, max_num_seqs=3)
    for one, two in zip(
        expected, generate(runner, PROMPTS, params=PARAMS, max_tokens=5, budget=21), strict=True
    ):
        assert one.output == two.output
        np.testing.assert_allclose(one.logits, two.logits, atol=1e-5)
        assert [entry.top_ids for entry in one.logprobs] == [entry.top_ids for entry in two.logprobs]
        for a, b in zip(one.logprobs, two.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5) and a.rank == b.rank


@pytest.mark.parametrize("kernels", ["cuda", "reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_an_int8_cache_serves_a_model(kernels):
    """As on the CPU, but for elements that fall to the other side of a half."""
    if kernels == "triton":
        run_interpreted("check_int8(TritonKernels())")
    elif kernels == "cuda":
        check_int8(emulated_kernels())
    else:
        check_int8(ReferenceKernels())


def check_int8(kernels: GpuKernels) -> None:
    settings = {"kv_cache_dtype": "int8"}
    expected = generate(make_runner(**settings), PROMPTS, max_tokens=4, budget=21)
    exact = generate(make_runner(), PROMPTS, max_tokens=4, budget=21)
    runner = make_runner(backend="gpu", kernels=kernels, max_num_seqs=3, **settings)
    for run, one, other in zip(
        generate(runner, PROMPTS, max_tokens=4, budget=21), expected, exact, strict=True
    ):
        assert run.output == one.output
        np.testing.assert_allclose(run.logits, one.logits, atol=0.01)
        assert np.abs(np.stack(run.logits) - np.stack(other.logits)).max() > 1e-4


@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
def test_cuda_kernels_serve_a_model(backend):
    check(emulated_kernels(), backend)


def emulated_kernels() -> EmulatedKernels:
    library = emulated(
        "attention_decode.cu", "elementwise.cu", "rotary_cache.cu", "copy_blocks.cu", "sampling.cu"
    )
    return EmulatedKernels(library, num_multiprocessors=2, device_index=None)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the kernels on it")
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "olmo2", "opt", "qwen2moe"])
def test_triton_kernels_serve_other_families(family, tmp_path):
    pytest.importorskip("triton")
    from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels

    files = resolve(str(make_tiny_model(tmp_path, family)))
    config = ModelConfig.from_files(files)
    checkpoint = open_checkpoint(files, config)
    expected = generate(make_runner(checkpoint, config, backend="torch"), PROMPTS, max_tokens=2, budget=21)
    runner = make_runner(checkpoint, config, backend="gpu", kernels=TritonKernels(), max_num_seqs=3)
    for one, two in zip(expected, generate(runner, PROMPTS, max_tokens=2, budget=21), strict=True):
        assert one.output == two.output
        np.testing.assert_allclose(one.logits, two.logits, atol=3e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the kernels on it")
def test_triton_kernels_serve_a_model():
    run_interpreted("check(TritonKernels(), 'gpu')")


def run_interpreted(call: str) -> None:
    """A call of this module's in a process of its own: the interpreter is chosen when triton is imported."""
    pytest.importorskip("triton")
    program = (
        "from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels\n"
        f"from test_gpu_kernels import *\n{call}\n"
    )
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "runner")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
