"""A model's forward over one prompt in numpy, and what it finds out about the inputs of its matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_models import TINY, load_reference, make_tiny_model

from streamllm.models.calibration import column_importance, input_energies
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.prompt_ops import PromptOps, StoredWeights
from streamllm.models.registry import family_of
from streamllm.models.rope import RopeTable
from streamllm.sources.model_files import ModelFiles

PROMPT = [int(id) for id in np.random.default_rng(0).integers(3, 320, 40)]
"""Longer than the tiny models' windows."""


def opened(folder: Path) -> tuple[ModelFiles, ModelConfig, Checkpoint]:
    files = ModelFiles(name="m", served_name="m", kind="folder", path=folder)
    config = ModelConfig.from_files(files)
    return files, config, open_checkpoint(files, config)


@pytest.mark.parametrize("family", TINY)
def test_logits_are_those_of_transformers(family, tmp_path):
    _, config, checkpoint = opened(make_tiny_model(tmp_path, family))
    model_family = family_of(config.architecture)
    model = model_family.load_weights(StoredWeights(checkpoint), config)
    ops = PromptOps(checkpoint, RopeTable(config.ropes, len(PROMPT)), PROMPT, lambda names, x: None)
    logits = model_family.logits(model, ops, model_family.forward(model, ops, None))
    with torch.inference_mode():
        expected = load_reference(tmp_path)(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(logits - expected).max() < 2e-3 * expected.std()


def test_energies_are_the_mean_squares_of_the_inputs(tmp_path):
    _, config, checkpoint = opened(make_tiny_model(tmp_path, dtype="bfloat16"))
    reference, seen = load_reference(tmp_path), {}
    for name, module in reference.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.update({f"model.{name}.weight": inputs[0][0].numpy()})
            )
    with torch.inference_mode():
        reference(torch.tensor([PROMPT]))
    energies = input_energies(checkpoint, config, PROMPT)
    assert energies.keys() == seen.keys()
    for name, x in seen.items():
        np.testing.assert_allclose(energies[name], np.square(x).mean(0), rtol=2e-3)


def test_importance_is_there_for_every_matrix_of_a_layer(tmp_path):
    files, config, checkpoint = opened(make_tiny_model(tmp_path, "qwen2moe"))
    importance = column_importance(checkpoint, config, files)
    in_layers = {name for name in checkpoint.names() if ".layers." in name}
    matrices = {name for name in in_layers if len(checkpoint.shape(name)) == 2}
    assert importance.keys() == matrices
    for name, weights in importance.items():
        assert weights.shape == checkpoint.shape(name)[1:] and weights.dtype == np.float32
        assert weights.min() >= 0.0099 * weights.mean() > 0


def test_experts_without_tokens_have_none(tmp_path):
    _, config, checkpoint = opened(make_tiny_model(tmp_path, "mixtral"))
    energies = input_energies(checkpoint, config, PROMPT[:1])
    experts = {
        name.split(".experts.")[1].split(".")[0]
        for name in energies
        if "layers.0" in name and "experts" in name
    }
    assert len(experts) == 2  # of 4


def test_weights_that_are_not_finite_give_no_importance(tmp_path):
    folder = make_tiny_model(tmp_path)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, config, checkpoint = opened(folder)
    energies = input_energies(checkpoint, config, PROMPT)
    assert "model.layers.0.self_attn.o_proj.weight" in energies
    assert "model.layers.1.self_attn.q_proj.weight" not in energies
