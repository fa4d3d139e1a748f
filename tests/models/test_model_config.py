"""Configs of folders, against what transformers makes of the same file, and of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from helpers.tiny_models import FAMILIES, new_tiny_model

from streamllm.errors import ModelLoadError
from streamllm.models.gguf_config import GGUFFields, read_layer_windows
from streamllm.models.llama import LlamaConfig
from streamllm.models.model_config import ModelConfig, RopeConfig
from streamllm.sources import ModelFiles

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = {family: f"{family.capitalize()}ForCausalLM" for family in FAMILIES}


def folder_files(folder: Path) -> ModelFiles:
    return ModelFiles(name=str(folder), served_name=folder.name, kind="folder", path=folder)


def write(folder: Path, generation: Any = None, **fields: Any) -> ModelFiles:
    """``BASE`` with ``fields`` as config.json; a field set to ``...`` is left out."""
    values = {name: value for name, value in {**BASE, **fields}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder_files(folder)


def read(folder: Path, generation: Any = None, **fields: Any) -> ModelConfig:
    return ModelConfig.from_files(write(folder, generation, **fields))


def family_fields(family: str) -> dict[str, Any]:
    return {"architectures": [ARCHITECTURES[family]], "model_type": family}


def of(architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": ...}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("present", ["minimal", "null", "full"])
def test_defaults_are_those_of_transformers(tmp_path: Path, family: str, present: str) -> None:
    optional = {
        "minimal": {},
        "null": {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None},
        "full": {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
            "rope_theta": 12345.0,
            "tie_word_embeddings": True,
            "bos_token_id": 5,
            "eos_token_id": [6, 7],
        },
    }[present]
    if present == "null" and family == "qwen3":
        del optional["head_dim"]  # transformers refuses a null here
    if present == "null" and family == "mistral":
        del optional["num_key_value_heads"]  # and here
    config = read(tmp_path, **family_fields(family), **optional)

    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.architecture == ARCHITECTURES[family]
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.ropes[0] == RopeConfig(
        rope_type="default", theta=theirs.rope_parameters["rope_theta"], rotary_dim=config.head_dim
    )
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    eos = theirs.eos_token_id
    assert list(config.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert config.bos_token_id == theirs.bos_token_id


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flags", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_biases_and_norms_are_those_of_the_model(tmp_path: Path, family: str, flags: dict) -> None:
    config = read(tmp_path, **family_fields(family), **flags)

    parameters = dict(new_tiny_model(family, **flags).named_parameters())
    layer = "model.layers.0."
    assert config.qkv_bias == (layer + "self_attn.q_proj.bias" in parameters)
    assert config.attention_out_bias == (layer + "self_attn.o_proj.bias" in parameters)
    assert config.mlp_bias == (layer + "mlp.down_proj.bias" in parameters)
    assert config.qk_norm == (layer + "self_attn.q_norm.weight" in parameters)


OTHERS = {
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
}
ABSENT = {"num_key_value_heads": ..., "num_hidden_layers": 8, "num_attention_heads": 32}


@pytest.mark.parametrize("model_type", OTHERS)
@pytest.mark.parametrize("optional", [{}, ABSENT], ids=["usual", "absent"])
def test_defaults_of_the_other_families(tmp_path: Path, model_type: str, optional: dict) -> None:
    config = read(tmp_path, architectures=[OTHERS[model_type]], model_type=model_type, **optional)

    check_defaults(config, transformers.AutoConfig.from_pretrained(tmp_path))


def check_defaults(config: ModelConfig, theirs: Any) -> None:
    assert config.vocab_size == theirs.vocab_size
    assert (config.num_heads, config.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert config.head_dim == head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    eos = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    assert (list(config.eos_token_ids), config.bos_token_id) == (eos, theirs.bos_token_id)
    window, layer_types = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None)
    slides = [kind == "sliding_attention" for kind in layer_types or [window and "sliding_attention"]]
    if layer_types is None:
        slides *= config.num_layers
    assert config.layer_windows == tuple(window if slid else None for slid in slides)
    by_layer = theirs.rope_parameters.get("full_attention")
    parameters = (
        [by_layer, theirs.rope_parameters["sliding_attention"]] if by_layer else [theirs.rope_parameters]
    )
    for rope, expected in zip(config.ropes, parameters, strict=False):
        assert (rope.rope_type, rope.theta) == (expected["rope_type"], expected["rope_theta"])
        assert rope.factor == expected.get("factor", 1.0)


@pytest.mark.parametrize("outer", [{}, {"eos_token_id": [1, 106], "tie_word_embeddings": True}])
def test_the_text_config_of_a_multimodal_config(tmp_path: Path, outer: dict) -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "sliding_window": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", **outer}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": text}))

    config = ModelConfig.from_files(folder_files(tmp_path))

    theirs = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    theirs.eos_token_id = outer.get("eos_token_id", theirs.eos_token_id)
    check_defaults(config, theirs)
    assert config.context_length == 131072  # of which the scaling is a part


WINDOWS: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    ("llama", {"sliding_window": 8}, (None, None, None)),
    ("mistral", {"sliding_window": 8}, (8, 8, 8)),
    ("mistral", {"sliding_window": None}, (None, None, None)),
    ("mistral", {}, (4096, 4096, 4096)),
    ("qwen2", {"sliding_window": 8}, (None, None, None)),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
    (
        "qwen3",
        {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
        (None, None, None),
    ),
    (
        "qwen3",
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (8, None, 8),
    ),
]


@pytest.mark.parametrize(("family", "fields", "expected"), WINDOWS)
def test_windows(tmp_path: Path, family: str, fields: dict, expected: tuple) -> None:
    assert read(tmp_path, **family_fields(family), **fields).layer_windows == expected


SCALINGS: list[dict[str, Any]] = [
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 1,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_rope_of_both_generations_of_configs(tmp_path: Path, scaling: dict, style: str) -> None:
    if style == "rope_scaling":
        fields: dict[str, Any] = {"rope_theta": 500000.0, "rope_scaling": scaling}
    else:
        fields = {"rope_parameters": {**scaling, "rope_theta": 500000.0}}
    rope = read(tmp_path, max_position_embeddings=1024, **fields).ropes[0]

    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert rope.rope_type == theirs["rope_type"]
    assert rope.theta == theirs["rope_theta"] == 500000.0
    assert rope.factor == theirs["factor"]
    assert rope.original_max_position_embeddings == theirs.get("original_max_position_embeddings", 1024)
    for name in (
        "low_freq_factor",
        "high_freq_factor",
        "attention_factor",
        "beta_fast",
        "mscale",
        "truncate",
    ):
        if name in scaling:
            assert getattr(rope, name) == scaling[name]


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1024),
    ],
)
def test_context_length_counts_the_scaling_in(tmp_path: Path, scaling: Any, length: int) -> None:
    config = read(tmp_path, max_position_embeddings=1024, rope_scaling=scaling)
    assert config.context_length == length


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (1, [1, 106], (1, 106)),
        ([1, 2], 3, (1, 2, 3)),
        (None, [5], (5,)),
        (7, None, (7,)),
        (7, ..., (7,)),
        (..., ..., (2,)),
    ],
)
def test_every_eos_counts(tmp_path: Path, config_eos: Any, generation_eos: Any, expected: tuple) -> None:
    generation = None if generation_eos is ... else {"eos_token_id": generation_eos, "temperature": 0.5}
    assert read(tmp_path, generation, eos_token_id=config_eos).eos_token_ids == expected


def test_recommended_sampling(tmp_path: Path) -> None:
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_length": 20}
    assert read(tmp_path, generation).default_sampling == {"temperature": 0.6, "top_p": 0.9}
    assert read(tmp_path, {"temperature": 0.6}).default_sampling == {"temperature": 0.6}
    assert read(tmp_path, {"do_sample": False, "temperature": 0.6}).default_sampling == {}


def test_the_family_of_a_config_without_architectures_is_its_model_type(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=..., model_type="qwen2")
    assert config.architecture == "Qwen2ForCausalLM"
    assert config.qkv_bias


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["NoSuchModel"], "model_type": "no-such"}, "no-such"),
    ({"architectures": ..., "model_type": "no-such"}, "no-such"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
    ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported"),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope type 'spiral' is not supported"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}},
        "long_factor must be a list of 8 positive numbers",
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
        "short_factor must be a list of 8 positive numbers",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
    ({"rope_theta": float("inf")}, "rope_theta must be a positive number, got inf"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' are not supported"),
    ({"hidden_size": ...}, "has no hidden_size"),
    ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
    ({"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
    ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    (
        {**family_fields("qwen3"), "layer_types": ["full_attention"]},
        "layer_types must be a list with one type for each of the 3 layers",
    ),
    (
        {**family_fields("qwen3"), "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer type 'linear_attention' is not supported",
    ),
    ({**family_fields("qwen2"), "layer_types": ["sliding_attention"] * 3}, "there is no window"),
    (
        {**of("SmolLM3ForCausalLM"), "no_rope_layers": [1, 0]},
        "no_rope_layers must be a list with 0 or 1 for each of the 3 layers, got [1, 0]",
    ),
    (
        {**of("MinistralForCausalLM"), "sliding_window": None, "layer_types": ["sliding_attention"] * 3},
        "there is no window: set sliding_window",
    ),
    ({**of("Gemma2ForCausalLM"), "sliding_window": None}, "there is no window: set sliding_window"),
    ({**of("Gemma3ForCausalLM"), "sliding_window_pattern": 0}, "sliding_window_pattern must be a positive"),
    ({**of("Gemma3ForCausalLM"), "use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
    (
        {**of("Gemma3ForCausalLM"), "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        "rope_parameters must be an object with full_attention and sliding_attention",
    ),
    ({**of("Olmo3ForCausalLM"), "layer_types": "sliding_attention"}, "layer_types must be a list with one"),
    ({**of("Phi3ForCausalLM"), "partial_rotary_factor": 0.7}, "partial_rotary_factor 0.7"),
    ({**of("GraniteForCausalLM"), "logits_scaling": 0}, "logits_scaling must be a positive number, got 0"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refusals_are_one_line_that_names_the_field(tmp_path: Path, fields: dict, message: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        read(tmp_path, **fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("window", "pattern", "expected"),
    [
        (None, None, (None,) * 4),
        (0, [True] * 4, (None,) * 4),
        (8, None, (8, 8, None, 8)),
        (8, 2, (8, None, 8, None)),
        (8, 1, (None,) * 4),
        (8, [False, True, True, False], (None, 8, 8, None)),
    ],
)
def test_windows_of_a_gguf(window: Any, pattern: Any, expected: tuple) -> None:
    assert read_layer_windows(gguf_fields(window, pattern), 4, period=3) == expected


@pytest.mark.parametrize("pattern", [[True], "every other", 0])
def test_windows_of_a_gguf_that_contradict_its_layers(pattern: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"m\.gguf: gemma3\.attention\.sliding_window_pattern must be"):
        read_layer_windows(gguf_fields(8, pattern), 4, period=3)


def gguf_fields(window: Any, pattern: Any) -> GGUFFields:
    values = {"sliding_window": window, "sliding_window_pattern": pattern}
    metadata = {f"gemma3.attention.{name}": value for name, value in values.items() if value is not None}
    return GGUFFields(SimpleNamespace(metadata=metadata, path="m.gguf"), "gemma3")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\xff", "[" * 100_000])
def test_broken_json(tmp_path: Path, name: str, content: str) -> None:
    files = write(tmp_path)
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=name):
        ModelConfig.from_files(files)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        ModelConfig.from_files(folder_files(tmp_path))


def test_the_default_models_config(default_model_path: Path) -> None:
    config = ModelConfig.from_files(ModelFiles("", "", "gguf", default_model_path))
    assert config == LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=pytest.approx(1e-5),
        max_position_embeddings=8192,
        ropes=(RopeConfig(rope_type="default", theta=100000.0, rotary_dim=64),),
        tie_word_embeddings=True,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=(None,) * 30,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
