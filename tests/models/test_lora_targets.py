from __future__ import annotations

from pathlib import Path

import pytest
from helpers.lora_adapters import save_adapter
from helpers.tiny_models import make_tiny_model

from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.lora_adapter import read_adapter
from streamllm.models.lora_targets import adaptable_matrices, lora_bytes
from streamllm.models.model_config import ModelConfig
from streamllm.ops.lora import LoraLimits
from streamllm.sources.model_files import ModelFiles


def open_model(path: Path):
    files = ModelFiles(name="m", served_name="m", kind="folder", path=path)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_full_slots_take_what_adapters_of_every_layer_take(family, tmp_path):
    path = make_tiny_model(tmp_path / "base", family)
    config, checkpoint = open_model(path)
    adapter = read_adapter("a", save_adapter(tmp_path / "adapter", path, seed=0), config, max_rank=4)
    assert lora_bytes(config, LoraLimits(3, 4), checkpoint, "float32") == 3 * adapter.num_bytes
    assert lora_bytes(config, LoraLimits(1, 8), checkpoint, "packed") == 2 * adapter.num_bytes
    assert lora_bytes(config, None, checkpoint, "packed") == 0


def test_adapters_beside_16_bit_weights_have_16_bits(tmp_path):
    config, checkpoint = open_model(make_tiny_model(tmp_path / "m", dtype="bfloat16"))
    sizes = [lora_bytes(config, LoraLimits(1, 4), checkpoint, mode) for mode in ("float32", "packed")]
    assert sizes[0] == 2 * sizes[1] > 0


def test_experts_embedding_and_head_are_not_adaptable(tmp_path):
    config, _ = open_model(make_tiny_model(tmp_path / "m", "qwen2moe"))
    names = {name for matrix in adaptable_matrices(config) for name, _ in matrix.parts}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"} <= names
    assert "model.layers.0.mlp.shared_expert.down_proj" in names
    assert not any(".experts." in name or "embed" in name or "head" in name for name in names)
