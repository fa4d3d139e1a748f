from __future__ import annotations

import pytest

from streamllm.config import EngineConfig, ServerConfig
from streamllm.errors import ConfigError
from streamllm.settings import parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5k", 1500),
        ("2GiB", 2**31),
        ("500MB", 5 * 10**8),
        ("7B", 7),
    ],
)
def test_quantities(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "4q", "1.0001k", "0x10", "4 k k"])
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"block_size": 17}, "--block-size"),
        ({"dtype": "int3"}, "--dtype"),
        ({"threads": 0}, "--threads"),
        ({"seed": True}, "--seed"),
        ({"max_model_len": "many"}, "--max-model-len"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization"),
        ({"max_num_seqs": None}, "--max-num-seqs"),
        ({"model": 5}, "--model"),
        ({"enforce_eager": "yes"}, "--enforce-eager"),
    ],
)
def test_a_bad_setting_names_its_flag(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        EngineConfig(**settings)


def test_lists_take_one_value_or_several():
    assert ServerConfig(api_key="a").api_key == ("a",)
    assert ServerConfig(api_key=["a", "b"]).api_key == ("a", "b")
    with pytest.raises(ConfigError, match="--api-key"):
        ServerConfig(api_key=[""])


def test_a_small_token_budget_caps_the_sequences():
    assert EngineConfig(max_num_batched_tokens=16).max_num_seqs == 16


def test_adapters_have_room_without_being_told():
    modules = [f"a{i}=/adapters/{i}" for i in range(10)]
    config = EngineConfig(lora_modules=modules)
    assert config.enable_lora and (config.max_loras, config.max_cpu_loras) == (10, 40)
    assert config.lora_module_paths["a3"] == "/adapters/3"
    assert (config.lora_limits.max_loras, config.lora_limits.max_rank) == (10, 16)
    assert EngineConfig(enable_lora=True).lora_limits.max_loras == 8
    assert EngineConfig().lora_limits is None
    as_json = EngineConfig(lora_modules=['{"name": "sql", "path": "/a=b", "base_model_name": "m"}'])
    assert as_json.lora_module_paths == {"sql": "/a=b"}


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_modules": ["a"]},
        {"lora_modules": ["=b"]},
        {"lora_modules": ["a="]},
        {"lora_modules": ["{}"]},
        {"lora_modules": ["{a"]},
        {"lora_modules": ["a=b", "a=c"]},
        {"max_loras": 0},
        {"max_lora_rank": 0},
        {"max_loras": 4, "max_cpu_loras": 3},
    ],
)
def test_what_is_wrong_with_adapters_names_its_flag(settings):
    name = next(reversed(settings))
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        EngineConfig(**settings)
