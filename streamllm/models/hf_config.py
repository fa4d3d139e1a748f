"""What families share in reading ``config.json``, understood as transformers understands it.

Both generations are read: transformers 4 wrote ``rope_theta`` and ``rope_scaling``, transformers 5 writes
``rope_parameters``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from streamllm.errors import ModelLoadError
from streamllm.models.config_fields import REQUIRED, ConfigFields
from streamllm.models.folder_checkpoint import stored_head_differs
from streamllm.models.model_config import ModelConfig, RopeConfig, RopeType
from streamllm.models.quantized import QUANTIZATION_FIELDS, check_quantization, find_quantization, refused
from streamllm.models.registry import family_of_config, stored_layout
from streamllm.models.transformers_config import read_transformers_config
from streamllm.ops import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
"""``hidden_act`` and its like."""

_OF_WHOLE_MODEL = ("bos_token_id", "eos_token_id", *QUANTIZATION_FIELDS)
"""Fields that a multimodal config has beside ``text_config``, where they count more than in it."""
_SEE_AHEAD = ("paligemma",)
"""``model_type`` of multimodal models whose prompts see ahead, which their text model alone does not."""
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Defaults:
    """What transformers takes for a family's absent fields; of the ids ``None`` is none.

    Attributes:
        num_kv_heads: ``None``: as many as query heads.
        head_dim: ``None``: the hidden size shared by the query heads.
        vocab_size, num_heads: absent in the text models of some multimodal configs; elsewhere they must be
            there.
    """

    max_position_embeddings: int
    num_kv_heads: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    vocab_size: int = REQUIRED
    num_heads: int = REQUIRED


def read_hf_config(folder: Path, *, trust_remote_code: bool = False) -> ModelConfig:
    """Reads ``config.json`` and, where there is one, ``generation_config.json``.

    Args:
        trust_remote_code: as in :meth:`ModelConfig.from_files`.

    Raises:
        ModelLoadError: as :meth:`ModelConfig.from_files` says.
    """
    whole = ConfigFields.read(folder / "config.json")
    fields = _text_model(whole)
    described = family_of_config(fields)
    if (quantization := find_quantization(fields)) is not None:
        if described is None:
            raise refused(quantization, " in models that run through Transformers")
        if quantization.method not in stored_layout(described[0]).quant_methods:
            check_quantization(quantization)
    if described is None:
        return read_transformers_config(whole, trust_remote_code=trust_remote_code)
    architecture, family = described
    return family.read_config(fields, architecture)


def _text_model(fields: ConfigFields) -> ConfigFields:
    """The config of the text model in a multimodal one; ``fields`` themselves in others.

    The weights decide whether it is tied (:func:`stored_head_differs`): so is one without a stored head.
    """
    text = fields.get("text_config")
    if not isinstance(text, dict) or fields.get("model_type") in _SEE_AHEAD:
        return fields
    outer = {name: fields.get(name) for name in _OF_WHOLE_MODEL if fields.get(name) is not None}
    tied = {"tie_word_embeddings": fields.get("tie_word_embeddings", True)}
    return ConfigFields(fields.path, {**text, **outer, **tied})


def read_common(fields: ConfigFields, architecture: str, defaults: Defaults) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that mean the same in every family: all but ``ropes`` and
    ``layer_windows``."""
    num_heads = fields.integer("num_attention_heads", defaults.num_heads)
    hidden_size = fields.integer("hidden_size")
    default_head_dim = None if fields.has("head_dim") else defaults.head_dim
    bos = fields.token_ids("bos_token_id", defaults.bos_token_id)
    eos, default_sampling = read_generation_config(fields.path.parent)
    tied = fields.flag("tie_word_embeddings", defaults.tie_word_embeddings)
    return {
        "architecture": architecture,
        "vocab_size": fields.integer("vocab_size", defaults.vocab_size),
        "hidden_size": hidden_size,
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(fields, defaults, num_heads),
        "head_dim": fields.integer("head_dim", default_head_dim) or _shared(fields, hidden_size, num_heads),
        "max_position_embeddings": fields.integer(
            "max_position_embeddings", defaults.max_position_embeddings
        ),
        "tie_word_embeddings": tied
        and not stored_head_differs(fields.path.parent, stored_layout(architecture)),
        "eos_token_ids": tuple(dict.fromkeys(fields.token_ids("eos_token_id", defaults.eos_token_id) + eos)),
        "bos_token_id": bos[0] if bos else None,
        "default_sampling": default_sampling,
    }


def _shared(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"{fields.path}: {fields.name_of('hidden_size')} ({hidden_size}) must be a multiple of "
            f"{fields.name_of('num_attention_heads')} ({num_heads}), as there is no head_dim."
        )
    return hidden_size // num_heads


def _num_kv_heads(fields: ConfigFields, defaults: Defaults, num_heads: int) -> int:
    absent = not fields.has("num_key_value_heads")
    default = defaults.num_kv_heads if absent and defaults.num_kv_heads is not None else num_heads
    num_kv_heads: int = fields.integer("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{fields.path}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})."
        )
    return num_kv_heads


def read_window(fields: ConfigFields, default: int | None) -> int | None:
    """``sliding_window``; ``default`` where it is absent, ``None`` where it is null."""
    return fields.integer("sliding_window", None if fields.has("sliding_window") else default)


def read_layer_windows(
    fields: ConfigFields, window: int | None, num_layers: int
) -> tuple[int | None, ...] | None:
    """The window of each layer by ``layer_types``; ``None`` where the field is absent.

    Raises:
        ModelLoadError: a type that is not known, or windows without a length.
    """
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return None
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
            f"{fields.path}: layer_types has sliding_attention, but there is no window: set sliding_window."
        )
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def read_alternating_windows(
    fields: ConfigFields, window: int | None, num_layers: int, *, period: int
) -> tuple[int | None, ...]:
    """The window of each layer by ``layer_types``; where the field is absent every ``period``-th has none.

    Raises:
        ModelLoadError: as :func:`read_layer_windows`.
    """
    listed = read_layer_windows(fields, window, num_layers)
    if listed is not None:
        return listed
    if window is None and period > 1:
        raise ModelLoadError(f"{fields.path}: layers alternate, but there is no window: set sliding_window.")
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def read_rope(
    fields: ConfigFields, head_dim: int, max_position_embeddings: int, *, default_theta: float = 10000.0
) -> RopeConfig:
    """``rope_scaling`` wins over ``rope_parameters``; a base inside them over ``rope_theta`` beside them."""
    return rope_from_parameters(
        fields, rope_parameters(fields), head_dim, max_position_embeddings, default_theta=default_theta
    )


def rope_parameters(fields: ConfigFields) -> dict[str, Any]:
    """The object that describes the rotary embedding; an empty one where there is none."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    return _object(fields, name)


def read_ropes_by_layer_type(
    fields: ConfigFields,
    head_dim: int,
    max_position_embeddings: int,
    *,
    full_theta: float,
    sliding_theta: float,
) -> tuple[RopeConfig, RopeConfig]:
    """(that of layers with full attention, that of layers with a window); the bases are for absent ones.

    ``rope_scaling``, which is of the older generation, is of full attention alone.
    """
    by_type = _object(fields, "rope_parameters")
    if by_type and not by_type.keys() & {"full_attention", "sliding_attention"}:
        raise fields.wrong("rope_parameters", "an object with full_attention and sliding_attention")
    beside = ConfigFields(fields.path, by_type)
    full = {**_object(beside, "full_attention"), **_object(fields, "rope_scaling")}
    sliding = _object(beside, "sliding_attention")
    return (
        rope_from_parameters(fields, {"rope_theta": full_theta, **full}, head_dim, max_position_embeddings),
        rope_from_parameters(
            fields, {"rope_theta": sliding_theta, **sliding}, head_dim, max_position_embeddings
        ),
    )


def _object(fields: ConfigFields, name: str) -> dict[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise fields.wrong(name, "an object")
    return value


def rope_from_parameters(
    fields: ConfigFields,
    parameters: dict[str, Any],
    head_dim: int,
    max_position_embeddings: int,
    *,
    default_theta: float = 10000.0,
    may_be_partial: bool = False,
) -> RopeConfig:
    """A rotary embedding from an object like ``rope_parameters``, absent entries read from beside it.

    Args:
        may_be_partial: the family has models that rotate only a part of each head.
    """
    rope = ConfigFields(fields.path, parameters)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in get_args(RopeType):
        raise ModelLoadError(
            f"{fields.path}: rope type {rope_type!r} is not supported; supported are "
            f"{', '.join(get_args(RopeType))}."
        )
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if head_dim % 2:
        raise ModelLoadError(
            f"{fields.path}: head_dim ({head_dim}) must be even: a rotary embedding turns pairs."
        )
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim or (rotary_dim < head_dim and not may_be_partial):
        raise ModelLoadError(
            f"{fields.path}: a rotary embedding over {rotary_dim} of a head's {head_dim} dimensions "
            f"(partial_rotary_factor {partial}) is not supported."
        )
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta, rotary_dim=rotary_dim)
    original = max_position_embeddings
    if rope_type in ("llama3", "yarn", "longrope"):
        original = rope.integer("original_max_position_embeddings", original)
        original = fields.integer("original_max_position_embeddings", original)
    default_factor = max_position_embeddings / original if rope_type in ("yarn", "longrope") else REQUIRED
    is_llama3 = rope_type == "llama3"
    is_longrope = rope_type == "longrope"
    return RopeConfig(
        rope_type=cast(RopeType, rope_type),
        theta=theta,
        rotary_dim=rotary_dim,
        factor=rope.number("factor", default_factor),
        original_max_position_embeddings=original,
        low_freq_factor=rope.number("low_freq_factor", REQUIRED if is_llama3 else 1.0),
        high_freq_factor=rope.number("high_freq_factor", REQUIRED if is_llama3 else 4.0),
        attention_factor=rope.number("attention_factor", None),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", None),
        mscale_all_dim=rope.number("mscale_all_dim", None),
        truncate=rope.flag("truncate", True),
        short_factors=_factors(rope, "short_factor", rotary_dim) if is_longrope else None,
        long_factors=_factors(rope, "long_factor", rotary_dim) if is_longrope else None,
    )


def _factors(rope: ConfigFields, name: str, rotary_dim: int) -> tuple[float, ...]:
    """One divisor a frequency (``"longrope"``)."""
    values = rope.get(name)
    if (
        not isinstance(values, list)
        or len(values) != rotary_dim // 2
        or not all(isinstance(value, int | float) and 0 < value < math.inf for value in values)
    ):
        raise ModelLoadError(
            f"{rope.path}: {name} must be a list of {rotary_dim // 2} positive numbers, one for each pair of "
            "rotated dimensions."
        )
    return tuple(map(float, values))


def read_generation_config(folder: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The ids that end a text, and the sampling fields, of ``generation_config.json``."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return (), {}
    fields = ConfigFields.read(path)
    eos = fields.token_ids("eos_token_id", None)
    if fields.values.get("do_sample") is False:
        return eos, {}
    chosen = {name: fields.values[name] for name in _SAMPLING_FIELDS if fields.values.get(name) is not None}
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.wrong(name, "a number")
    return eos, chosen
