"""Adapters on the GPU's path, with graphs and without, against models with the same adapters merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cpu_as_gpu import ReplayRecorder, new_runner
from helpers.drive import Generation, generate
from helpers.lora_adapters import save_adapter, save_merged
from helpers.tiny_models import make_tiny_model

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.ops.gpu.kernels import AdapterStack, GpuKernels
from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.ops.lora import LoraAdapter, LoraLimits
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

pytestmark = pytest.mark.slow

LIMITS = LoraLimits(max_loras=3, max_rank=16)
PROMPTS = [list(range(20, 20 + length)) for length in (5, 33, 1, 17)]
ADAPTERS = [
    {"rank": 4},
    {"rank": 16, "lora_alpha": 32},
    {"rank": 3, "target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
]


class Folder:
    """A model, adapters of it, and each of them merged."""

    def __init__(self, path: Path, family: str):
        self.base = make_tiny_model(path / "base", family)
        self.adapters = [
            save_adapter(path / f"adapter-{seed}", self.base, seed=seed, **settings)
            for seed, settings in enumerate(ADAPTERS)
        ]
        self.merged = [
            save_merged(path / f"merged-{seed}", self.base, adapter)
            for seed, adapter in enumerate(self.adapters)
        ]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Folder:
    return Folder(tmp_path_factory.mktemp("llama"), "llama")


def load(path: Path, backend: str, *, lora: LoraLimits | None = LIMITS, **changes) -> ModelRunner:
    files = ModelFiles(name=path.name, served_name=path.name, kind="folder", path=path)
    config = ModelConfig.from_files(files)
    settings = {
        "block_size": 16,
        "num_blocks": 32,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_dtype": "float32",
        "max_model_len": 128,
        "threads": 1,
        "progress": False,
        **changes,
    }
    return new_runner(config, open_checkpoint(files, config), backend=backend, lora=lora, **settings)


def adapters_of(runner: ModelRunner, folder: Folder) -> list[LoraAdapter]:
    return [runner.read_adapter(path.name, str(path)) for path in folder.adapters]


def check_against_merged(
    folder: Folder, backend: str, kernels: GpuKernels | None = None, budget: int = 30
) -> None:
    """Three adapters and the base in one batch, prompts in chunks."""
    runner = load(folder.base, backend, kernels=kernels, max_num_batched_tokens=budget)
    together = generate(
        runner, PROMPTS, adapters=[*adapters_of(runner, folder), None], max_tokens=3, budget=budget
    )
    runner.close()
    for run, path, tokens in zip(together, [*folder.merged, folder.base], PROMPTS, strict=True):
        alone = load(path, "cpu", lora=None)
        assert_same(run, generate(alone, [tokens], max_tokens=3)[0])
        alone.close()


def assert_same(run: Generation, expected: Generation) -> None:
    assert run.output == expected.output
    np.testing.assert_allclose(np.stack(run.logits), np.stack(expected.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
def test_adapters_and_the_base_in_one_batch_equal_merged_models(llama, backend):
    check_against_merged(llama, backend)


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_matrices_of_other_layouts(family, tmp_path, monkeypatch):
    names = {"gpt2": ["c_attn", "c_fc"], "phi3": ["qkv_proj", "down_proj"]}[family]
    monkeypatch.setitem(ADAPTERS[2], "target_modules", names)
    check_against_merged(Folder(tmp_path, family), "gpu-graphs")


@pytest.mark.slow
def test_triton_kernels_with_graphs(llama):
    pytest.importorskip("triton")
    from helpers.triton_device import DEVICE

    if DEVICE != "cpu":
        pytest.skip("the CPU stands for the GPU here")
    from streamllm.ops.gpu.triton_kernels.kernels import TritonKernels

    class OfAdapters(ReferenceKernels):
        """All but what adapters add comes from the reference."""

        def lora_add(self, *arguments) -> None:
            TritonKernels().lora_add(*arguments)

    check_against_merged(llama, "gpu-graphs", OfAdapters(), budget=18)


class CountingKernels(ReferenceKernels):
    calls = 0

    def lora_add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, stack: AdapterStack) -> None:
        self.calls += 1
        super().lora_add(out, x, slots, stack)


def launches(kernels: CountingKernels, work: Callable[[], object]) -> int:
    before = kernels.calls
    work()
    return kernels.calls - before


@pytest.mark.parametrize("backend", ["gpu", "gpu-graphs"])
def test_steps_without_adapters_launch_nothing_for_them(llama, backend):
    kernels = CountingKernels()
    runner = load(llama.base, backend, kernels=kernels)
    adapter = adapters_of(runner, llama)[0]
    plain = load(llama.base, backend, lora=None)
    for run, expected in zip(
        *(generate(each, PROMPTS, max_tokens=2) for each in (runner, plain)), strict=True
    ):
        np.testing.assert_array_equal(run.logits, expected.logits)
    assert launches(kernels, lambda: generate(runner, PROMPTS, max_tokens=2)) == 0
    one_row = launches(kernels, lambda: generate(runner, PROMPTS[:1], adapters=[adapter], max_tokens=1))
    assert one_row == 4 * 2  # matrices of a layer, layers


def test_loading_and_clearing_a_slot_records_nothing(llama, monkeypatch):
    runner = load(llama.base, "gpu-graphs", lora=LoraLimits(max_loras=1, max_rank=16))
    adapters = adapters_of(runner, llama)

    def refuse(self: ReplayRecorder) -> None:
        raise AssertionError("a graph was recorded")

    monkeypatch.setattr(ReplayRecorder, "begin", refuse)
    for index in (1, 2, 0, 1):  # the third changes fewer matrices than the others
        (run,) = generate(runner, [PROMPTS[1]], adapters=[adapters[index]], max_tokens=2)
        merged = load(llama.merged[index], "cpu", lora=None)
        assert_same(run, generate(merged, [PROMPTS[1]], max_tokens=2)[0])
        merged.close()


def test_room_for_adapters_counts_as_weights(llama):
    plain, roomy = (load(llama.base, "gpu", lora=lora)._backend.ops for lora in (None, LIMITS))
    elements = sum(
        stack.a.numel() + stack.b.numel()
        for stack in roomy._adapters._stacks.values()  # type: ignore[union-attr]
    )
    assert roomy.weight_bytes - plain.weight_bytes >= 4 * elements > 0
