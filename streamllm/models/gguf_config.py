"""A model's config from a GGUF file's metadata and tensor directory.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Whether there are biases, a separate head and
frequency factors is not in the metadata: the tensors tell.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError
from streamllm.models.config_fields import REQUIRED
from streamllm.models.gguf_checkpoint import map_data, read_values, stored_rows
from streamllm.models.model_config import ModelConfig, RopeConfig
from streamllm.models.registry import GGUF_ARCHITECTURES, family_of
from streamllm.sources.gguf_file import GGUFFile, open_gguf

_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


def read_gguf_config(path: Path) -> ModelConfig:
    """Reads the config of a GGUF file.

    Raises:
        ModelLoadError: as :meth:`ModelConfig.from_files` says.
    """
    file = open_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"{path}: the GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)}."
        )
    entry = GGUF_ARCHITECTURES[architecture]
    fields = GGUFFields(file, architecture)
    name = entry.architecture
    if entry.with_experts is not None and fields.number("expert_count", 0):
        name = entry.with_experts
    return family_of(name).read_gguf_config(fields, name)


def read_common(fields: GGUFFields, architecture: str) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that mean the same in every family: all but ``ropes`` and
    ``layer_windows``."""
    file = fields.file
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(
            f"The weights in {file.path} lack the tensor model.embed_tokens.weight (token_embd)."
        )
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{file.path}: attention.head_count ({num_heads}) must be a multiple of attention.head_count_kv "
            f"({num_kv_heads})."
        )
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path}: heads with different key and value lengths are not supported.")
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return {
        "architecture": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "num_layers": fields.integer("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_ids": _eos_token_ids(file.metadata),
        "bos_token_id": bos if isinstance(bos, int) else None,
    }


class GGUFFields:
    """An architecture's metadata values, read with their types; a wrong one names itself. Names are without
    the architecture in front: ``"attention.head_count"``."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of this name, llama.cpp's: ``"blk.0.attn_q.bias"``."""
        return name in self.file.tensors

    def dimension(self, name: str, axis: int) -> int:
        """The size of a tensor, by llama.cpp's name, along an axis (rows first)."""
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) <= axis:
            raise ModelLoadError(f"The weights in {self.file.path} lack the tensor {name}.")
        return tensor.shape[axis]

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def integer(self, name: str, default: Any = REQUIRED) -> int:
        """A positive integer."""
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise self.wrong(name, "a positive integer", value)
        return int(value)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """A finite number >= 0."""
        value = self.get(name)
        if value is None:
            if default is REQUIRED:
                raise ModelLoadError(f"{self.file.path}: the metadata lack {self.architecture}.{name}.")
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.wrong(name, "a number", value)
        return value

    def wrong(self, name: str, expected: str, value: Any) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file.path}: {self.architecture}.{name} must be {expected}, got {value!r}."
        )


def read_rope(fields: GGUFFields, head_dim: int, context_length: int) -> RopeConfig:
    """The rotary embedding that the metadata (and the tensor ``rope_freqs``) describe."""
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"{fields.file.path}: a rotary embedding over {rotary_dim} of a head's {head_dim} dimensions is "
            "not supported."
        )
    theta = float(fields.number("rope.freq_base", 10000.0))
    if fields.has_tensor(_LONG_FACTORS):
        return _longrope(fields, theta, rotary_dim, context_length)
    scaling = fields.get("rope.scaling.type") or "none"
    factor = float(fields.number("rope.scaling.factor", 0) or fields.number("rope.scale_linear", 0) or 1.0)
    if scaling == "yarn":
        return RopeConfig(
            rope_type="yarn",
            theta=theta,
            rotary_dim=rotary_dim,
            factor=factor,
            original_max_position_embeddings=fields.integer(
                "rope.scaling.original_context_length", context_length
            ),
            attention_factor=_yarn_attention_factor(fields, factor),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    if scaling not in ("none", "linear"):
        raise ModelLoadError(
            f"{fields.file.path}: rope scaling {scaling!r} is not supported; supported are none, linear, "
            "yarn."
        )
    return RopeConfig(
        rope_type="linear" if factor != 1 else "default",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        frequency_factors=_frequency_factors(fields.file, rotary_dim),
    )


def _yarn_attention_factor(fields: GGUFFields, factor: float) -> float:
    """The converter writes transformers' own, if the model sets it. Else llama.cpp takes the paper's
    temperature, 0.1 ln(factor) + 1, over that with the weight ``yarn_log_multiplier``, times ``attn_factor``.
    """
    if fields.get("rope.scaling.yarn_attn_factor") is not None:
        return fields.number("rope.scaling.yarn_attn_factor")
    logarithm = 0.1 * math.log(factor) if factor > 1 else 0.0
    temperature = (1 + logarithm) / (1 + fields.number("rope.scaling.yarn_log_multiplier", 0) * logarithm)
    return temperature * fields.number("rope.scaling.attn_factor", 1.0)


def _longrope(fields: GGUFFields, theta: float, rotary_dim: int, context_length: int) -> RopeConfig:
    trained = fields.integer("rope.scaling.original_context_length", context_length)
    has_factor = fields.get("rope.scaling.attn_factor") is not None
    return RopeConfig(
        rope_type="longrope",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=context_length / trained,
        original_max_position_embeddings=trained,
        attention_factor=fields.number("rope.scaling.attn_factor") if has_factor else None,
        short_factors=_factors(fields.file, _SHORT_FACTORS, rotary_dim),
        long_factors=_factors(fields.file, _LONG_FACTORS, rotary_dim),
    )


def read_sliding_rope(fields: GGUFFields, rope: RopeConfig, default_theta: float) -> RopeConfig:
    """The rotary embedding of layers with a window in a model where only the others', ``rope``, is scaled."""
    theta = float(fields.number("rope.freq_base_swa", default_theta))
    return RopeConfig(rope_type="default", theta=theta, rotary_dim=rope.rotary_dim)


def read_layer_windows(
    fields: GGUFFields, num_layers: int, *, period: int, default_window: int = 0
) -> tuple[int | None, ...]:
    """The window of each layer; where the metadata do not choose, every ``period``-th has none."""
    window = int(fields.number("attention.sliding_window", default_window))
    if not window:
        return (None,) * num_layers
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise fields.wrong("attention.sliding_window_pattern", f"a list of {num_layers} flags", pattern)
        return tuple(window if slides else None for slides in pattern)
    period = fields.integer("attention.sliding_window_pattern", period)
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def _frequency_factors(file: GGUFFile, rotary_dim: int) -> tuple[float, ...] | None:
    """The tensor in which llama.cpp's converter writes down Llama 3's scaling, one divisor a frequency."""
    return _factors(file, "rope_freqs.weight", rotary_dim) if "rope_freqs.weight" in file.tensors else None


def _factors(file: GGUFFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    """A tensor with one divisor a frequency."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelLoadError(f"The weights in {file.path} lack the tensor {name}.")
    if tensor.num_elements != rotary_dim // 2:
        raise ModelLoadError(
            f"The tensor {name} in {file.path} has {tensor.num_elements} elements; by the metadata it must "
            f"have {rotary_dim // 2}."
        )
    return tuple(read_values(stored_rows(map_data([tensor]), tensor), tensor).ravel().tolist())


def _eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message, in this order, those that are set."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(value for value in ids if isinstance(value, int) and value >= 0))
