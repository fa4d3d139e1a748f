"""Which models can run through Transformers, and what is said of those that cannot."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.transformers_models import other_config

from streamllm.errors import ModelLoadError
from streamllm.models.model_config import ModelConfig
from streamllm.models.transformers_config import TransformersConfig
from streamllm.sources.model_files import ModelFiles

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(folder: Path, config: Any, **changes: Any) -> ModelConfig:
    fields = config.to_dict() if isinstance(config, transformers.PreTrainedConfig) else config
    (folder / "config.json").write_text(json.dumps(fields | changes, default=str))
    return ModelConfig.from_files(ModelFiles(name="m", served_name="m", kind="folder", path=folder))


def refusal(folder: Path, config: Any, **changes: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read(folder, config, **changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("falcon", {"num_hidden_layers": 1}, "it does not attend through Transformers' attention interface"),
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "attention interface"),
        ("mpt", {"n_layers": 1}, "takes no position_ids"),
        ("bloom", {"n_layer": 1}, "takes no position_ids"),
        ("bert", {"num_hidden_layers": 1}, "does not see exactly all positions before a token"),
        ("t5", {}, "it is no causal language model"),
        ("bart", {}, "it is an encoder with a decoder"),
        ("mamba", {"num_hidden_layers": 1}, "layers of other kinds than attention"),
        ("rwkv", {"num_hidden_layers": 1}, "a recurrent state besides its keys and values"),
        ("qwen3_next", {"num_hidden_layers": 4}, r"other kinds than attention \(linear_attention\)"),
        ("llama4_text", {**SMALL, "num_hidden_layers": 4}, r"kinds than attention \(chunked_attention\)"),
        ("diffllama", SMALL, "layers.0.self_attn is called more than once a forward"),
        ("gemma4_text", {"num_hidden_layers": 6}, r"its layers differ in key_dim \(256, 512\)"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_reason(tmp_path, model_type, fields, reason):
    config = transformers.AutoConfig.for_model(model_type, **fields)
    architecture = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    message = refusal(tmp_path, config, architectures=[architecture or "SomethingElse"])
    assert re.search(reason, message), message
    assert f"{architecture or 'SomethingElse'} is not supported" in message
    assert str(tmp_path / "config.json") in message


def test_a_rotary_embedding_of_each_sequences_own_length_is_refused(tmp_path):
    config = other_config(
        "cohere", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    assert "its rotary embedding (dynamic) would follow the longest" in refusal(tmp_path, config)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}, 1024),
    ],
)  # fmt: skip
def test_the_longest_context_is_what_our_own_descriptions_say(tmp_path, rope, length):
    config = read(tmp_path, other_config("olmo", rope_parameters={"rope_theta": 1e4, **rope}))
    assert isinstance(config, TransformersConfig)
    assert config.context_length == length


def test_a_mask_that_shows_other_positions_than_the_layer_says_is_refused(tmp_path, monkeypatch):
    """Were a model's window told to its mask alone, its attention would see too much."""
    from transformers import masking_utils

    monkeypatch.setattr(
        masking_utils, "sliding_window_causal_mask_function",
        lambda window: masking_utils.and_masks(
            masking_utils.sliding_window_overlay(window - 1), masking_utils.causal_mask_function
        ),
    )  # fmt: skip
    message = refusal(tmp_path, other_config("cohere2"))
    assert "does not see exactly a window of 24 positions" in message


def test_nobody_knows_the_model(tmp_path):
    message = refusal(tmp_path, {"model_type": "newest", "architectures": ["NewestForCausalLM"]})
    assert "NewestForCausalLM is not supported: neither streamllm nor Transformers" in message
    assert "knows the model_type 'newest'" in message


def test_a_config_that_transformers_refuses(tmp_path):
    message = refusal(tmp_path, other_config("cohere2"), num_attention_heads="many")
    assert "config.json" in message


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_extra_its_name_is_given(tmp_path, monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else find_spec(name, *rest)
    )
    message = refusal(tmp_path, other_config("cohere2"), architectures=["Cohere2ForCausalLM"])
    assert message.endswith(
        "Cohere2ForCausalLM has no description of its own; install `pip install 'streamllm[gpu]'` to run it "
        "through Transformers."
    )


def test_a_trial_takes_no_memory_for_weights(tmp_path):
    """Of 100 billion parameters."""
    config = other_config("cohere2", hidden_size=16384, intermediate_size=65536, num_hidden_layers=24,
                          layer_types=["full_attention"] * 24)  # fmt: skip
    assert read(tmp_path, config).num_layers == 24


def test_described_families_ask_for_neither(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "streamllm.models.transformers_trial", None)
    fields = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6}
    assert not read(tmp_path, fields).through_transformers
