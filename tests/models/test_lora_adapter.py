"""Adapters as PEFT saves them: what is read, and what is refused with its name and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.lora_adapters import save_adapter
from helpers.tiny_models import make_tiny_model
from safetensors.numpy import load_file, save_file

from streamllm.errors import ConfigError, ModelLoadError
from streamllm.models.lora_adapter import read_adapter
from streamllm.models.lora_targets import adaptable_matrices, check_adaptable
from streamllm.models.model_config import ModelConfig
from streamllm.ops.lora import LoraAdapter
from streamllm.sources.model_files import ModelFiles

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
LAYER = "model.layers.0.self_attn.q_proj"


def config_of(path: Path) -> ModelConfig:
    return ModelConfig.from_files(ModelFiles(name="m", served_name="m", kind="folder", path=path))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def config(base) -> ModelConfig:
    return config_of(base)


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"), base, seed=0, rank=4)


@pytest.fixture
def adapter(saved, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def read(path: Path, config: ModelConfig, max_rank: int = 16) -> LoraAdapter:
    return read_adapter("a", path, config, max_rank=max_rank)


def change_config(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(adapter: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)


def test_every_layer_is_found_in_its_matrix(saved, config):
    adapter = read(saved, config)
    tensors = load_file(saved / "adapter_model.safetensors")
    assert set(adapter.updates) == {matrix.name for matrix in adaptable_matrices(config)}
    assert adapter.rank == 4 and adapter.name == "a"
    by_row = {update.first_row: update for update in adapter.updates[LAYER]}
    for first_row, part in ((0, "q_proj"), (64, "k_proj"), (96, "v_proj")):
        name = Q_PROJ.replace("q_proj", part)
        np.testing.assert_array_equal(by_row[first_row].a, tensors[f"{name}.lora_A.weight"])
        # lora_alpha / r
        np.testing.assert_array_equal(by_row[first_row].b, 2 * tensors[f"{name}.lora_B.weight"])
    assert adapter.num_bytes == 4 * sum(tensor.size for tensor in tensors.values())


def test_file_of_torch_save_reads_the_same(adapter, config):
    import torch
    from safetensors.torch import load_file as load_tensors

    expected = read(adapter, config)
    weights = adapter / "adapter_model.safetensors"
    torch.save(load_tensors(weights), adapter / "adapter_model.bin")
    weights.unlink()
    for name, updates in read(adapter, config).updates.items():
        for update, same in zip(updates, expected.updates[name], strict=True):
            np.testing.assert_array_equal(update.a, same.a)
            np.testing.assert_array_equal(update.b, same.b)


def test_content_says_whether_weights_or_scale_are_others(adapter, config, tmp_path):
    content = read(adapter, config).content
    shutil.copytree(adapter, tmp_path / "copy")
    assert read(tmp_path / "copy", config).content == content
    change_config(tmp_path / "copy", lora_alpha=9)
    assert read(tmp_path / "copy", config).content != content
    change_tensors(adapter, lambda tensors: tensors[f"{Q_PROJ}.lora_A.weight"].__imul__(2))
    assert read(adapter, config).content != content


def test_adapter_outlives_its_file(adapter, config):
    found = read(adapter, config)
    before = {name: [update.a.copy() for update in updates] for name, updates in found.updates.items()}
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    for name, updates in found.updates.items():
        for update, a in zip(updates, before[name], strict=True):
            np.testing.assert_array_equal(update.a, a)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is IA3; only LORA"),
        ({"bias": "all"}, "biases.*bias='none'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_dora": True}, "DoRA.*merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save is \["lm_head"\].*merge_and_unload'),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'.*conversion"),
        ({"r": "4"}, "r must hold numbers"),
        ({"lora_alpha": None}, "lora_alpha must hold numbers"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must hold numbers"),
        ({"alpha_pattern": {"(": 2}}, "'\\(' is no regular expression"),
        ({"r": 8}, "have rank 4; by its adapter_config.json it must be 8"),
    ],
)
def test_settings_that_mean_something_else_are_refused(adapter, config, fields, reason):
    change_config(adapter, **fields)
    with pytest.raises(ModelLoadError, match=reason):
        read(adapter, config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda tensors: tensors.update({f"{Q_PROJ}.lora_A.weight": np.ones((4, 32), np.float32)}),
            rf"{LAYER} in .* have shapes \[4, 32\] \(lora_A\) and \[64, 4\] .* must be \[rank, 64\] and "
            r"\[64, rank\].*another base model",
        ),
        (
            lambda tensors: tensors.update({f"{Q_PROJ}.lora_B.weight": np.ones((64, 3), np.float32)}),
            r"must be \[rank, 64\] and \[64, rank\]",
        ),
        (
            lambda tensors: tensors.update({f"{Q_PROJ}.lora_B.weight": np.ones(64, np.float32)}),
            r"lora_B.weight in .* has shape \[64\]",
        ),
        (
            lambda tensors: tensors.pop(f"{Q_PROJ}.lora_B.weight"),
            rf"lacks the tensor lora_B.weight of {LAYER}",
        ),
        (
            lambda tensors: tensors[f"{Q_PROJ}.lora_A.weight"].fill(np.nan),
            f"{LAYER}.lora_A.weight.*not finite",
        ),
        (
            lambda tensors: tensors.update({f"{Q_PROJ}.lora_magnitude_vector": np.ones(4, np.float32)}),
            "lora_magnitude_vector, which is no lora_A or lora_B",
        ),
        (
            lambda tensors: tensors.update(
                {
                    f"{Q_PROJ.replace('.0.', '.9.')}.lora_{side}.weight": np.ones((4, 4), np.float32)
                    for side in "AB"
                }
            ),
            r"layers.9.self_attn.q_proj, which this model \(LlamaForCausalLM with 2 layers\) does not have",
        ),
        (
            lambda tensors: tensors.update(
                {f"base_model.model.lm_head.lora_{side}.weight": np.ones((4, 4), np.float32) for side in "AB"}
            ),
            "lm_head; adapters of the embedding and the head are not supported",
        ),
        (lambda tensors: tensors.clear(), "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(adapter, config, change, reason):
    change_tensors(adapter, change)
    with pytest.raises(ModelLoadError, match=reason):
        read(adapter, config)


def test_rank_above_the_limit_is_refused_with_the_flag(saved, config):
    with pytest.raises(ModelLoadError, match=r"has rank 4 .*--max-lora-rank allows 3. Raise it to 4"):
        read(saved, config, max_rank=3)


def test_folder_without_an_adapter_is_refused(adapter, config, tmp_path):
    with pytest.raises(ModelLoadError, match="There is no folder"):
        read(tmp_path / "nowhere", config)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        read(adapter, config)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"adapter_config.json cannot be read: No such file"):
        read(adapter, config)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no adapter: neither adapter_model.safetensors"):
        read(adapter, config)


def test_adapter_of_another_family_is_refused(saved, tmp_path):
    with pytest.raises(ModelLoadError, match="another base model"):
        read(saved, config_of(make_tiny_model(tmp_path / "gpt2", "gpt2")))


def test_adapter_of_experts_is_refused(adapter, tmp_path):
    config = config_of(make_tiny_model(tmp_path / "moe", "qwen3moe"))
    expert = Q_PROJ.replace("self_attn.q_proj", "mlp.experts.1.up_proj")
    kept = {f"{expert}.lora_{side}.weight": np.ones((4, 4), np.float32) for side in "AB"}
    change_tensors(adapter, lambda tensors: (tensors.clear(), tensors.update(kept)))
    with pytest.raises(ModelLoadError, match=r"mlp.experts.1.up_proj; adapters of experts are not supported"):
        read(adapter, config)


def test_model_that_runs_through_transformers_is_refused_by_name(config):
    from types import SimpleNamespace

    check_adaptable(config)
    with pytest.raises(ConfigError, match="--enable-lora does not go with MambaForCausalLM"):
        check_adaptable(SimpleNamespace(through_transformers=True, architecture="MambaForCausalLM"))
