"""What OPT's files have of their own: learned positions behind two rows, names without ``model.``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_models import make_tiny_model
from safetensors.torch import load_file, save_file

from streamllm.errors import ModelLoadError
from streamllm.models.checkpoint import Checkpoint, open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.sources.model_files import ModelFiles

POSITIONS = "model.decoder.embed_positions.weight"


def load(folder: Path) -> tuple[ModelConfig, Checkpoint]:
    files = ModelFiles(name="opt", served_name="opt", kind="folder", path=folder)
    config = ModelConfig.from_files(files)
    return config, open_checkpoint(files, config)


def rewrite(folder: Path, change: dict[str, object] | None = None, **fields: object) -> None:
    """Changes a config's fields."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (change or {}) | fields))


def test_positions_begin_at_the_third_row(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "opt", max_position_embeddings=40)
    config, checkpoint = load(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")[POSITIONS]
    assert stored.shape == (42, 64)
    assert config.context_length == 40
    assert np.array_equal(checkpoint.read(POSITIONS), stored[2:].numpy())


@pytest.mark.parametrize("head", ["absent", "stored"])
def test_names_without_their_prefix(tmp_path: Path, head: str) -> None:
    """As facebook/opt-350m stores them, in a file of torch.save, with or without the tied head."""
    make_tiny_model(tmp_path, "opt-post-norm", tied=True)
    _, expected = load(tmp_path)
    values = {name: expected.read(name) for name in expected.names()}
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    if head == "stored":
        tensors["lm_head.weight"] = tensors["decoder.embed_tokens.weight"].clone()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    path.unlink()
    config, checkpoint = load(tmp_path)
    assert config.tie_word_embeddings and checkpoint.names() == set(values)
    for name, value in values.items():
        assert np.array_equal(checkpoint.read(name), value)


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "opt", tied=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"] + 1
    save_file(tensors, path)
    config, checkpoint = load(tmp_path)
    assert not config.tie_word_embeddings
    assert np.array_equal(checkpoint.read("lm_head.weight"), tensors["lm_head.weight"].numpy())


def test_old_configs(tmp_path: Path) -> None:
    """facebook/opt-125m's config.json, of 2022, has no word_embed_proj_dim of its own for other sizes, no
    enable_bias, and no tie_word_embeddings."""
    make_tiny_model(tmp_path, "opt", tied=True)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for name in (
        "enable_bias",
        "layer_norm_elementwise_affine",
        "tie_word_embeddings",
        "activation_function",
    ):
        del fields[name]
    path.write_text(json.dumps(fields))
    config, _ = load(tmp_path)
    assert config.tie_word_embeddings and config.bias and config.norm_affine
    assert config.activation == "relu"


def test_contradictions_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "opt", max_position_embeddings=40)
    rewrite(tmp_path, max_position_embeddings=64)
    with pytest.raises(ModelLoadError, match=rf"{POSITIONS} in .* has shape \[42, 64\].* must be \[66, 64\]"):
        load(tmp_path)
    rewrite(tmp_path, max_position_embeddings=40, activation_function="mish")
    with pytest.raises(ModelLoadError, match=r"activation_function 'mish' is not supported"):
        load(tmp_path)


def test_absent_fields_mean_what_transformers_takes_them_for(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", **sizes}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    config = ModelConfig.from_files(ModelFiles("opt", "opt", "folder", tmp_path))
    assert config.architecture == "OPTForCausalLM" and config.head_dim == 16
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.embedding_size == theirs.word_embed_proj_dim
    assert (config.norm_before, config.final_norm) == (theirs.do_layer_norm_before, True)
    assert (config.bias, config.norm_affine) == (theirs.enable_bias, theirs.layer_norm_elementwise_affine)
    assert config.activation == theirs.activation_function
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert (config.eos_token_ids, config.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
