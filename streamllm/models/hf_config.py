"""A model's config from a Hugging Face folder, understood as transformers understands it.

Both generations are read: transformers 4 wrote ``rope_theta`` and ``rope_scaling``, transformers 5 writes
``rope_parameters``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from streamllm.errors import ModelLoadError
from streamllm.models.model_config import ModelConfig, RopeConfig, RopeType
from streamllm.models.safetensors_checkpoint import stored_head_differs

_REQUIRED = object()


@dataclass(frozen=True)
class _Family:
    """What transformers takes for a family's absent fields, and what its layers look like."""

    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    head_dim: int | None = None
    has_attention_bias: bool = False
    has_mlp_bias: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048, None, 1, 2, has_attention_bias=True, has_mlp_bias=True),
    "mistral": _Family("MistralForCausalLM", 131072, 8, 1, 2),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, 32, None, None),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, 32, None, None, head_dim=128, has_attention_bias=True),
}
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _Fields:
    """A JSON object whose fields are read with their types; a wrong one names itself."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> _Fields:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path} is not valid JSON ({error}).") from error
        if not isinstance(values, dict):
            raise ModelLoadError(f"{path} is not a JSON object.")
        return cls(path, values)

    def wrong(self, name: str, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {name} must be {expected}, got {self.values.get(name)!r}.")

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """A positive integer; ``default`` where the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelLoadError(f"{self.path} has no {name}.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite positive number; ``default`` where the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelLoadError(f"{self.path} has no {name}.")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def token_ids(self, name: str, default: int | None) -> tuple[int, ...]:
        """One id or a list of them; ``default`` where the field is absent (null means none)."""
        value = self.values.get(name, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(item for item in ids if item >= 0)


def read_hf_config(folder: Path) -> ModelConfig:
    """Reads ``config.json`` and, where there is one, ``generation_config.json``.

    Raises:
        ModelLoadError: as :meth:`ModelConfig.from_files` says.
    """
    fields = _Fields.read(folder / "config.json")
    family = _family(fields)
    hidden_act = fields.values.get("hidden_act") or "silu"
    if hidden_act not in ("silu", "swish"):
        raise ModelLoadError(f"{fields.path}: hidden_act {hidden_act!r} is not supported; supported is silu.")
    quantization = fields.values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else "?"
        raise ModelLoadError(
            f"{fields.path}: weights quantised with {method!r} are not supported. Use the model's "
            "unquantised weights or a GGUF of it."
        )
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    default_head_dim = family.head_dim if "head_dim" not in fields.values else None
    head_dim = fields.integer("head_dim", default_head_dim) or hidden_size // num_heads
    num_kv_heads = _num_kv_heads(fields, family, num_heads)
    max_position_embeddings = fields.integer("max_position_embeddings", family.max_position_embeddings)
    attention_bias = family.has_attention_bias and fields.flag("attention_bias")
    is_qwen2 = family.architecture == "Qwen2ForCausalLM"
    tied = fields.flag("tie_word_embeddings")
    bos = fields.token_ids("bos_token_id", family.bos_token_id)
    eos, default_sampling = _generation_config(folder)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=_rope(fields, head_dim, max_position_embeddings),
        tie_word_embeddings=tied and not stored_head_differs(folder),
        qkv_bias=attention_bias or is_qwen2,
        attention_out_bias=attention_bias,
        mlp_bias=family.has_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.architecture == "Qwen3ForCausalLM",
        layer_windows=_layer_windows(fields, family, num_layers),
        eos_token_ids=tuple(dict.fromkeys(fields.token_ids("eos_token_id", family.eos_token_id) + eos)),
        bos_token_id=bos[0] if bos else None,
        default_sampling=default_sampling,
    )


def _family(fields: _Fields) -> _Family:
    """The family by ``architectures``, or by ``model_type`` where that field is missing."""
    architectures = fields.values.get("architectures")
    supported = ", ".join(family.architecture for family in _FAMILIES.values())
    if not architectures:
        model_type = fields.values.get("model_type")
        if isinstance(model_type, str) and model_type in _FAMILIES:
            return _FAMILIES[model_type]
        raise ModelLoadError(
            f"{fields.path}: model_type {model_type!r} is not supported; supported architectures: "
            f"{supported}."
        )
    if not isinstance(architectures, list):
        raise fields.wrong("architectures", "a list of names")
    for family in _FAMILIES.values():
        if family.architecture in architectures:
            return family
    names = ", ".join(map(str, architectures))
    raise ModelLoadError(f"The architecture {names} is not supported; supported are {supported}.")


def _num_kv_heads(fields: _Fields, family: _Family, num_heads: int) -> int:
    absent = "num_key_value_heads" not in fields.values
    default = family.num_kv_heads if absent and family.num_kv_heads is not None else num_heads
    num_kv_heads: int = fields.integer("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{fields.path}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})."
        )
    return num_kv_heads


def _layer_windows(fields: _Fields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Which layers see only a window. Llama has none; Mistral's all have the same; Qwen's are chosen."""
    if family.architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    absent_or_set = "sliding_window" not in fields.values or fields.values["sliding_window"] is not None
    window = fields.integer("sliding_window", 4096) if absent_or_set else None
    if family.architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        window = None
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        first = fields.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise fields.wrong("max_window_layers", "an integer")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.wrong("layer_types", f"a list with one type for each of the {num_layers} layers")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelLoadError(
                f"{fields.path}: layer type {layer_type!r} is not supported; supported are full_attention "
                "and sliding_attention."
            )
    if window is None and "sliding_attention" in layer_types:
        raise ModelLoadError(
            f"{fields.path}: layer_types has sliding_attention, but there is no window: set sliding_window "
            "and use_sliding_window."
        )
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _rope(fields: _Fields, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """``rope_scaling`` wins over ``rope_parameters``; a base inside them over ``rope_theta`` beside them."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    parameters = fields.values.get(name) or {}
    if not isinstance(parameters, dict):
        raise fields.wrong(name, "an object")
    rope = _Fields(fields.path, parameters)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in get_args(RopeType):
        raise ModelLoadError(
            f"{fields.path}: rope type {rope_type!r} is not supported; supported are "
            f"{', '.join(get_args(RopeType))}."
        )
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0 or head_dim % 2:
        raise ModelLoadError(
            f"{fields.path}: a rotary embedding over part of a head (partial_rotary_factor {partial}, "
            f"head_dim {head_dim}) is not supported."
        )
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta, rotary_dim=head_dim)
    original = max_position_embeddings
    if rope_type in ("llama3", "yarn"):
        original = rope.integer("original_max_position_embeddings", original)
        original = fields.integer("original_max_position_embeddings", original)
    default_factor = max_position_embeddings / original if rope_type == "yarn" else _REQUIRED
    is_llama3 = rope_type == "llama3"
    return RopeConfig(
        rope_type=cast(RopeType, rope_type),
        theta=theta,
        rotary_dim=head_dim,
        factor=rope.number("factor", default_factor),
        original_max_position_embeddings=original,
        low_freq_factor=rope.number("low_freq_factor", _REQUIRED if is_llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", _REQUIRED if is_llama3 else 4.0),
        attention_factor=rope.number("attention_factor", None),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", None),
        mscale_all_dim=rope.number("mscale_all_dim", None),
        truncate=rope.flag("truncate", True),
    )


def _generation_config(folder: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The ids that end a text, and the sampling fields, of ``generation_config.json``."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return (), {}
    fields = _Fields.read(path)
    eos = fields.token_ids("eos_token_id", None)
    if fields.values.get("do_sample") is False:
        return eos, {}
    chosen = {name: fields.values[name] for name in _SAMPLING_FIELDS if fields.values.get(name) is not None}
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.wrong(name, "a number")
    return eos, chosen
