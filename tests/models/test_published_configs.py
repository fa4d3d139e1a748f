"""The configs of well-known models, against what is published of them and what transformers makes of them.

``published_configs.json`` holds config.json (and generation_config.json) in the form and with the sizes that
models are published with, written down rather than fetched, without the fields of training; the LongRoPE
factors of Phi-3-mini-128k stand in for others of their kind. ``expected`` is what they mean. For most models
the number of parameters is the published one (OPT's less the two position rows that no token reads).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from streamllm.errors import ModelLoadError
from streamllm.models import folder_checkpoint
from streamllm.models.checkpoint import open_checkpoint
from streamllm.models.model_config import ModelConfig
from streamllm.models.registry import family_of, stored_layout
from streamllm.models.rope import attention_factor, frequencies_at
from streamllm.models.tensor_shapes import TensorShapes, expected_shapes
from streamllm.models.transformers_trial import try_on_shapes
from streamllm.sources.model_files import ModelFiles

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text(encoding="utf-8")
)
OWN_PREFIXES = {"OPTForCausalLM": "model.", "GPT2LMHeadModel": "transformer."}
"""What transformers puts before names that the Hub's files have without it."""
BESIDE_THE_TEXT_MODEL = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.")


def files_in(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelFiles:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelFiles(name="m", served_name="m", kind="folder", path=folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_configs_mean(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    config = ModelConfig.from_files(
        files_in(tmp_path, published["config"], published.get("generation_config"))
    )
    assert {
        "parameters": sum(map(math.prod, expected_shapes(config).values())),
        "context_length": config.context_length,
        "windows": dict(Counter(map(str, config.layer_windows))),
        "ropes": [
            [rope.rope_type, rope.theta, rope.rotary_dim, rope.factor] for rope in dict.fromkeys(config.ropes)
        ],
        "tied": config.tie_word_embeddings,
        "eos": list(config.eos_token_ids),
        "bos": config.bos_token_id,
    } == published["expected"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_they_mean_the_same_once_transformers_5_has_rewritten_them(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]["config"]
    theirs = config_of_transformers(tmp_path, published)
    files = files_in(tmp_path, published)
    config = ModelConfig.from_files(files)
    theirs.save_pretrained(tmp_path)
    assert ModelConfig.from_files(files) == config


class ShapesOfFiles:
    """Weights of which there are only names and shapes (a
    :class:`~streamllm.models.checkpoint.Checkpoint`)."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes

    def names(self) -> set[str]:
        return set(self.shapes)

    def has(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def format(self, name: str) -> str:
        return "bfloat16"


def transformers_model(theirs: Any) -> Any:
    """Without memory for weights."""
    is_multimodal = theirs.get_text_config() is not theirs
    auto = transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(theirs, dtype=torch.bfloat16)


def shapes_on_the_hub(model: Any, config: dict[str, Any], *, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the files that belong to a model of transformers."""
    tensors = dict(model.state_dict())
    if tied:
        for name in model._tied_weights_keys:
            tensors.pop(name)
    prefix = OWN_PREFIXES.get(type(model).__name__, "")
    shapes = {
        name.removeprefix(prefix): tuple(tensor.shape)
        for name, tensor in revert_weight_conversion(model, tensors).items()
    }
    if "quantization_config" in config:  # MXFP4: 32 numbers in 16 bytes, and their scale
        for name in [name for name in shapes if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = shapes.pop(name)
            shapes[f"{name}_blocks"] = (experts, outputs, inputs // 32, 16)
            shapes[f"{name}_scales"] = (experts, outputs, inputs // 32)
    return shapes


def config_of_transformers(folder: Path, published: dict[str, Any]) -> Any:
    """Transformers 5 reads Phi-3's old name of LongRoPE no more."""
    config = {name: value for name, value in published.items() if name != "quantization_config"}
    if (config.get("rope_scaling") or {}).get("type") == "su":
        length = config["original_max_position_embeddings"]
        scaling = {**config["rope_scaling"], "type": "longrope", "original_max_position_embeddings": length}
        config["rope_scaling"] = scaling
    files_in(folder, config)
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_makes_the_same_of_them(tmp_path: Path, monkeypatch, name: str) -> None:
    published = PUBLISHED[name]["config"]
    theirs = config_of_transformers(tmp_path, published)
    files = files_in(tmp_path, published)
    config, text = ModelConfig.from_files(files), theirs.get_text_config()
    is_tied = theirs.tie_word_embeddings and text.tie_word_embeddings
    if text is not theirs:  # whose config says too little: whether there is a head decides
        config = replace(config, tie_word_embeddings=is_tied)
    assert config.tie_word_embeddings == is_tied

    model = transformers_model(theirs)
    # A Granite 4 without Mamba layers has no state, whatever its class says.
    monkeypatch.setattr(type(model), "_is_stateful", False)
    check_tensors(files, config, shapes_on_the_hub(model, published, tied=is_tied), monkeypatch)
    check_attention(config, text)
    check_ropes(config, text, model)


def check_tensors(
    files: ModelFiles, config: ModelConfig, on_the_hub: dict[str, tuple[int, ...]], monkeypatch: Any
) -> None:
    """All tensors are there in the shapes that they must have, and none is left over."""
    layout = stored_layout(config.architecture)
    stored = ShapesOfFiles(
        {
            layout.name_of(name): shape
            for name, shape in on_the_hub.items()
            if not name.startswith(BESIDE_THE_TEXT_MODEL)
        }
    )
    monkeypatch.setattr(folder_checkpoint, "FolderCheckpoint", lambda *_, **__: stored)
    open_checkpoint(files, config)
    sources = layout.sources(config, stored)
    read = {
        tensor
        for name in expected_shapes(config)
        for tensor in (sources[name].stored if name in sources else [name])
    }
    assert read == stored.names()


def check_attention(config: Any, text: Any) -> None:
    """Heads, window, scale and soft cap of each layer, and how experts are chosen."""
    ours = family_of(config.architecture).load_weights(TensorShapes(), config)
    calls = try_on_shapes(text, trust_remote_code=False).calls
    for layer, call in zip(ours.layers, calls, strict=True):
        attention = layer.attention.attention
        assert attention.num_heads == call.num_heads
        assert attention.num_kv_heads == call.num_kv_heads
        assert attention.head_dim == call.key_dim
        assert attention.window == (call.window or 0)
        assert attention.soft_cap == call.soft_cap
        is_scaled_before = config.architecture == "OPTForCausalLM"
        assert call.scale == pytest.approx(1.0 if is_scaled_before else attention.scale)
    if hasattr(config, "num_experts"):
        experts = ours.layers[0].mlp.experts
        assert experts.top_k == text.num_experts_per_tok
        assert experts.normalize == getattr(text, "norm_topk_prob", True)


def check_ropes(config: ModelConfig, text: Any, model: Any) -> None:
    (rotary,) = {
        type(module)
        for module in model.modules()
        if type(module).__name__.endswith("RotaryEmbedding") and "Pixtral" not in type(module).__name__
    } or {None}
    if rotary is None:
        assert not config.ropes
        return
    theirs = rotary(text)
    by_layer_type = hasattr(theirs, "full_attention_inv_freq")
    names = ["full_attention_", "sliding_attention_"] if by_layer_type else [""]
    for rope, prefix in zip(dict.fromkeys(config.ropes), names, strict=True):
        frequencies = getattr(theirs, f"{prefix}inv_freq").numpy()
        np.testing.assert_allclose(frequencies_at(rope, 1), frequencies, rtol=1e-6)
        assert attention_factor(rope) == pytest.approx(getattr(theirs, f"{prefix}attention_scaling"))


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "facebook/opt-125m",
        {"num_attention_heads": 7},
        "hidden_size (768) must be a multiple of num_attention_heads (7)",
    ),
    ("openai-community/gpt2", {"n_head": 7}, "n_embd (768) must be a multiple of n_head (7)"),
    (
        "microsoft/phi-4",
        {"num_attention_heads": 30},
        "hidden_size (5120) must be a multiple of num_attention_heads (30)",
    ),
    ("Qwen/Qwen3-0.6B", {"head_dim": 63}, "head_dim (63) must be even"),
    ("google/gemma-3-1b-it", {"head_dim": 255}, "head_dim (255) must be even"),
    ("allenai/OLMo-2-0425-1B", {"rope_scaling": {"type": "spiral"}}, "rope type 'spiral' is not supported"),
    (
        "allenai/Olmo-3-1025-7B",
        {"layer_types": ["full_attention"] * 31},
        "layer_types must be a list with one type for each of the 32 layers",
    ),
    (
        "Ministral-8B-Instruct-2410 with layer_types",
        {"layer_types": ["chunked_attention"] * 36},
        "layer type 'chunked_attention' is not supported",
    ),
    (
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        {"num_experts_per_tok": 9},
        "num_experts_per_tok must be at most num_local_experts, got 9",
    ),
    (
        "openai/gpt-oss-20b",
        {"num_experts_per_tok": 33},
        "num_experts_per_tok must be at most num_local_experts, got 33",
    ),
    (
        "Qwen/Qwen3-8B",
        {"quantization_config": {"quant_method": "quark"}},
        "weights quantised with 'quark' are not supported",
    ),
    (
        "Qwen/Qwen3-8B",
        {"quantization": {"group_size": 64, "bits": 4}},
        "weights quantised with 'mlx' are not supported",
    ),
    (
        "meta-llama/Llama-3.2-1B",
        {"compression_config": {"quant_method": "compressed-tensors"}},
        "config_groups must be an object with at least one group",
    ),
    (
        "google/gemma-3-4b-it",
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "'bitsandbytes' are not",
    ),
    (
        "ibm-granite/granite-4.0-micro",
        {"layer_types": ["mamba"] * 40},
        "layer_types must be a list of attention alone",
    ),
    ("ibm-granite/granite-4.0-micro", {"num_local_experts": 62}, "num_local_experts must be 0"),
]


@pytest.mark.parametrize(("name", "fields", "message"), CONTRADICTIONS)
def test_contradictions_are_named_in_one_short_line(tmp_path, name, fields, message):
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.from_files(files_in(tmp_path, PUBLISHED[name]["config"] | fields))
    line = str(caught.value).removeprefix(f"{tmp_path}/config.json: ")
    assert message in line
    assert len(line) < 220
    assert "\n" not in line


NOT_CAUSAL: list[dict[str, Any]] = [
    PUBLISHED["meta-llama/Llama-3.2-1B"]["config"] | {"architectures": ["LlamaForSequenceClassification"]},
    {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "text_config": {"model_type": "gemma2", "hidden_size": 64},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
]


@pytest.mark.parametrize("config", NOT_CAUSAL)
def test_heads_and_prompts_of_another_kind_are_not_served_as_text_models(tmp_path, config):
    with pytest.raises(ModelLoadError, match="it is no causal language model"):
        ModelConfig.from_files(files_in(tmp_path, config))


def test_code_of_its_own_is_not_taken_for_the_family(tmp_path):
    """Another architecture's name with code beside it: transformers decides whose is run."""
    own = {
        "architectures": ["MyForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"},
    }
    config = {**PUBLISHED["Qwen/Qwen2.5-0.5B"]["config"], "num_hidden_layers": 2, "max_window_layers": 2}
    assert ModelConfig.from_files(files_in(tmp_path, config | own)).through_transformers
    del own["auto_map"]
    assert not ModelConfig.from_files(files_in(tmp_path, config | own)).through_transformers
