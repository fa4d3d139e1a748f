"""Adapters side by side in one batch, against models with the same adapters merged into their weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from helpers.cpu_as_gpu import new_runner
from helpers.drive import Generation, generate
from helpers.lora_adapters import save_adapter, save_merged
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import VOCAB_SIZE, make_tiny_model

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.ops.lora import LoraLimits
from streamllm.runner.model_runner import ModelRunner
from streamllm.sources.model_files import ModelFiles

NUM_ADAPTERS = 8
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, VOCAB_SIZE) for _ in range(length)]


PROMPTS = [prompt(length, seed=length) for length in (5, 40, 1, 17, 33, 70, 16, 9, 24)]


def load(path: Path, *, backend: str = "cpu", lora: LoraLimits | None = None, **changes) -> ModelRunner:
    kind = "gguf" if path.suffix == ".gguf" else "folder"
    files = ModelFiles(name=path.name, served_name=path.name, kind=kind, path=path)
    config = ModelConfig.from_files(files)
    settings = {
        "block_size": 16,
        "num_blocks": 128,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 16,
        "kv_cache_dtype": "float32",
        "max_model_len": 256,
        "threads": 2,
        "progress": False,
        **changes,
    }
    return new_runner(config, open_checkpoint(files, config), backend=backend, lora=lora, **settings)


def adapter_settings(family: str, seed: int) -> dict:
    """Adapters of different ranks, scales and layers."""
    if family in ("gpt2", "opt"):
        return {"rank": seed + 1}
    return [
        {"rank": 4},
        {"rank": 16, "lora_alpha": 32},
        {"rank": 1, "target_modules": ["v_proj"] if family != "phi3" else ["qkv_proj"]},
        {"rank": 8, "use_rslora": True},
        {"rank": 5, "rank_pattern": {"o_proj": 3, "^model.layers.1.mlp.down_proj": 7}},
        {"rank": 4, "alpha_pattern": {"layers.0.self_attn.o_proj": 20}},
        {"rank": 3, "target_modules": r".*layers\.1\..*_proj"},
        {"rank": 2, "target_modules": ["down_proj", "o_proj"], "layers_to_transform": [0]},
    ][seed]


@dataclass
class Case:
    """A model, its adapters, and each adapter merged into the model."""

    base: Path
    adapters: list[Path]
    merged: list[Path]


def make_case(folder: Path, family: str, num_adapters: int = 3) -> Case:
    base = make_tiny_model(folder / "base", family)
    adapters = [
        save_adapter(folder / f"adapter-{seed}", base, seed=seed, **adapter_settings(family, seed))
        for seed in range(num_adapters)
    ]
    merged = [save_merged(folder / f"merged-{seed}", base, adapter) for seed, adapter in enumerate(adapters)]
    return Case(base, adapters, merged)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp("llama"), "llama", NUM_ADAPTERS)


@pytest.fixture(scope="module", params=["qwen2", "gemma3", "phi3", "gpt2", "opt", "granite4"])
def case(request, tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp(request.param), request.param)


LIMITS = LoraLimits(max_loras=NUM_ADAPTERS, max_rank=16)


def assert_same(run: Generation, expected: Generation) -> None:
    assert run.output == expected.output
    np.testing.assert_allclose(np.stack(run.logits), np.stack(expected.logits), atol=1e-4, rtol=1e-4)


def check_against_merged(case: Case, backend: str, base: Path | None = None) -> None:
    runner = load(case.base, backend=backend, lora=LIMITS)
    adapters = [runner.read_adapter(path.name, str(path)) for path in case.adapters]
    prompts = PROMPTS[: len(adapters) + 1]
    together = generate(runner, prompts, adapters=[*adapters, None], max_tokens=4, budget=48)
    runner.close()
    for run, path, tokens in zip(together, [*case.merged, base or case.base], prompts, strict=True):
        alone = load(path, backend=backend)
        assert_same(run, generate(alone, [tokens], max_tokens=4)[0])
        alone.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_eight_adapters_and_the_base_in_one_batch_equal_merged_models(llama, backend):
    check_against_merged(llama, backend)


def test_adapters_of_every_layout_equal_merged_models(case):
    check_against_merged(case, "cpu")


def test_adapters_differ_from_the_base_and_each_other(llama):
    runner = load(llama.base, lora=LIMITS)
    adapters = [runner.read_adapter(path.name, str(path)) for path in llama.adapters]
    runs = generate(runner, [PROMPTS[1]] * 9, adapters=[*adapters, None], max_tokens=1)
    for first in range(9):
        for second in range(first):
            assert np.abs(runs[first].logits[0] - runs[second].logits[0]).max() > 1e-3
    runner.close()


def llama_gguf(folder: Path, quantization: str) -> Path:
    """The same weights as those of ``llama.base``, as llama.cpp's converter stores them."""
    save_tiny_gguf(folder / "m.gguf", quantization=quantization)
    return folder / "m.gguf"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_sequence_is_the_same_to_the_bit_in_any_batch_and_chunks(llama, is_packed, threads, tmp_path):
    path, mode = (llama_gguf(tmp_path, "Q8_0"), "packed") if is_packed else (llama.base, "float32")
    runner = load(path, lora=LIMITS, threads=threads, weight_mode=mode)
    adapters = [*(runner.read_adapter(each.name, str(each)) for each in llama.adapters), None]
    together = generate(runner, PROMPTS, adapters=adapters, max_tokens=3, budget=128)
    chunked = generate(runner, PROMPTS, adapters=adapters, max_tokens=3, budget=7)
    for run, chunks, adapter, tokens in zip(together, chunked, adapters, PROMPTS, strict=True):
        (alone,) = generate(runner, [tokens], adapters=[adapter], max_tokens=3)
        np.testing.assert_array_equal(np.stack(run.logits), np.stack(alone.logits))
        np.testing.assert_array_equal(np.stack(chunks.logits), np.stack(alone.logits))
    runner.close()


def test_adapters_fit_a_gguf_whose_rows_llama_cpp_reordered(llama, tmp_path):
    check_against_merged(replace(llama, base=llama_gguf(tmp_path, "F32")), "cpu", base=llama.base)


def test_adapters_beside_quantised_weights(llama, tmp_path):
    path = llama_gguf(tmp_path, "Q8_0")
    logits = {}
    for mode in ("float32", "packed"):
        runner = load(path, lora=LIMITS, weight_mode=mode)
        adapter = runner.read_adapter("a", str(llama.adapters[1]))
        runs = generate(runner, [PROMPTS[1]] * 2, adapters=[adapter, None], max_tokens=1)
        logits[mode] = [run.logits[0] for run in runs]
        runner.close()
    exact, packed = (with_adapter - without for with_adapter, without in logits.values())
    # Activations have 8 bits there, and the adapter 16.
    assert np.linalg.norm(packed - exact) < 0.08 * np.linalg.norm(exact)


def test_a_row_without_an_adapter_is_untouched_by_room_for_them(llama):
    plain, roomy = load(llama.base), load(llama.base, lora=LIMITS)
    adapter = roomy.read_adapter("a", str(llama.adapters[0]))
    expected = generate(plain, PROMPTS[:2], max_tokens=3)
    alone = generate(roomy, PROMPTS[:2], max_tokens=3)
    beside = generate(roomy, PROMPTS[:3], adapters=[None, None, adapter], max_tokens=3)
    for index in range(2):
        np.testing.assert_array_equal(np.stack(alone[index].logits), np.stack(expected[index].logits))
        np.testing.assert_array_equal(np.stack(beside[index].logits), np.stack(expected[index].logits))
    plain.close(), roomy.close()


def test_a_slot_takes_one_adapter_after_the_other(llama):
    runner = load(llama.base, lora=LoraLimits(max_loras=1, max_rank=16))
    # The second changes fewer layers than the first: nothing of the first may be left.
    for index in (1, 2, 6, 1):
        adapter = runner.read_adapter("a", str(llama.adapters[index]))
        merged = load(llama.merged[index])
        (run,) = generate(runner, [PROMPTS[3]], adapters=[adapter], max_tokens=3)
        assert_same(run, generate(merged, [PROMPTS[3]], max_tokens=3)[0])
        merged.close()
    runner.close()
