"""What GPT-2's files have of their own: transposed matrices, names without ``transformer.``, masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_gguf import save_tiny_gguf
from helpers.tiny_models import make_tiny_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.sources.model_files import ModelFiles

C_ATTN = "transformer.h.1.attn.c_attn.weight"


def load(path: Path) -> tuple[ModelConfig, Checkpoint]:
    kind = "gguf" if path.suffix == ".gguf" else "folder"
    files = ModelFiles(name="gpt2", served_name="gpt2", kind=kind, path=path)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


def assert_same(one: Checkpoint, two: Checkpoint) -> None:
    assert one.names() == two.names()
    for name in one.names():
        assert np.array_equal(one.read(name), two.read(name)), name


def test_matrices_are_transposed(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gpt2")
    stored = load_file(tmp_path / "model.safetensors")
    _, checkpoint = load(tmp_path)
    assert checkpoint.shape(C_ATTN) == (192, 64) and stored[C_ATTN].shape == (64, 192)
    assert np.array_equal(checkpoint.read(C_ATTN), stored[C_ATTN].T.numpy())
    square = "transformer.h.0.attn.c_proj.weight"
    assert np.array_equal(checkpoint.read(square), stored[square].T.numpy())


def test_as_openai_stored_it(tmp_path: Path) -> None:
    """Without the prefix, and with the causal mask as a buffer of each layer."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder in (new, old):
        make_tiny_model(folder, "gpt2", tied=True)
    path = old / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path)
    assert_same(load(new)[1], load(old)[1])


def test_a_gguf_has_the_same_tensors(tmp_path: Path) -> None:
    """The converter has transposed its matrices already."""
    make_tiny_model(tmp_path / "folder", "gpt2")
    save_tiny_gguf(tmp_path / "m.gguf", "gpt2")
    config, checkpoint = load(tmp_path / "m.gguf")
    expected, folder = load(tmp_path / "folder")
    assert_same(checkpoint, folder)
    for name in ("inner_size", "layer_norm_eps", "activation", "layer_scales", "context_length"):
        assert getattr(config, name) == pytest.approx(getattr(expected, name)), name


def test_scales_of_the_scores(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True)
    assert load(tmp_path)[0].layer_scales == (0.25, 0.125)
    make_tiny_model(tmp_path, "gpt2", scale_attn_weights=False)
    assert load(tmp_path)[0].layer_scales == (1.0, 1.0)


def test_refusals(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"add_cross_attention": True}))
    with pytest.raises(ModelLoadError, match="add_cross_attention is not supported"):
        load(tmp_path)
    path.write_text(json.dumps(fields | {"n_inner": 128}))
    with pytest.raises(
        ModelLoadError, match=r"h\.0\.mlp\.c_fc\.weight in .* \[64, 96\].* must be \[64, 128\]"
    ):
        load(tmp_path)
    path.write_text(json.dumps({name: value for name, value in fields.items() if name != "n_embd"}))
    with pytest.raises(ModelLoadError, match=r"config\.json has no n_embd"):
        load(tmp_path)


def test_absent_fields_mean_what_transformers_takes_them_for(tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    config = ModelConfig.from_files(ModelFiles("gpt2", "gpt2", "folder", tmp_path))
    assert config.architecture == "GPT2LMHeadModel" and config.head_dim == 16
    assert (config.max_position_embeddings, config.inner_size) == (theirs.n_positions, 256)
    assert (config.layer_norm_eps, config.activation) == (theirs.layer_norm_epsilon, "gelu_tanh")
    assert config.layer_scales == (0.25, 0.25)
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert (config.eos_token_ids, config.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
