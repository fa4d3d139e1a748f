"""A model's config from a GGUF file's metadata and tensor directory.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Whether there are biases, a separate head and
frequency factors is not in the metadata: the tensors tell.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from streamllm.errors import ModelLoadError
from streamllm.models.gguf_checkpoint import map_data, read_tensor
from streamllm.models.model_config import ModelConfig, RopeConfig
from streamllm.sources.gguf_file import GGUFFile

# A GGUF of a Mistral says "llama".
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_REQUIRED = object()


def read_gguf_config(path: Path) -> ModelConfig:
    """Reads the config of a GGUF file.

    Raises:
        ModelLoadError: as :meth:`ModelConfig.from_files` says.
    """
    file = GGUFFile(path, arrays=False)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{path}: the GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}."
        )
    if file.metadata.get("split.count", 1) != 1:
        raise ModelLoadError(
            f"{path} is one part of a split GGUF. Join the parts with `llama-gguf-split --merge`."
        )
    values = _Values(file, architecture)
    if values.number("expert_count", 0):
        raise ModelLoadError(f"{path}: mixture-of-experts models are not supported.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"The weights in {path} lack the tensor model.embed_tokens.weight (token_embd).")
    num_layers = values.integer("block_count")
    num_heads = values.integer("attention.head_count")
    num_kv_heads = values.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{path}: attention.head_count ({num_heads}) must be a multiple of attention.head_count_kv "
            f"({num_kv_heads})."
        )
    hidden_size = values.integer("embedding_length")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{path}: heads with different key and value lengths are not supported.")
    context_length = values.integer("context_length")
    window = values.number("attention.sliding_window", 0)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=_ARCHITECTURES[architecture],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context_length,
        rope=_rope(values, head_dim, context_length),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        layer_windows=(int(window) or None,) * num_layers,
        eos_token_ids=_eos_token_ids(file.metadata),
        bos_token_id=bos if isinstance(bos, int) else None,
    )


class _Values:
    """An architecture's metadata values, read with their types; a wrong one names itself."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        """A positive integer."""
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise self.wrong(name, "a positive integer", value)
        return int(value)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number >= 0."""
        value = self.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelLoadError(f"{self.file.path}: the metadata lack {self.architecture}.{name}.")
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.wrong(name, "a number", value)
        return value

    def wrong(self, name: str, expected: str, value: Any) -> ModelLoadError:
        return ModelLoadError(
            f"{self.file.path}: {self.architecture}.{name} must be {expected}, got {value!r}."
        )


def _rope(values: _Values, head_dim: int, context_length: int) -> RopeConfig:
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim or head_dim % 2:
        raise ModelLoadError(
            f"{values.file.path}: a rotary embedding over {rotary_dim} of a head's {head_dim} dimensions is "
            "not supported."
        )
    theta = float(values.number("rope.freq_base", 10000.0))
    scaling = values.get("rope.scaling.type") or "none"
    factor = float(values.number("rope.scaling.factor", 0) or values.number("rope.scale_linear", 0) or 1.0)
    if scaling == "yarn":
        # llama.cpp multiplies its attention factor onto the paper's temperature, 0.1 ln(factor) + 1.
        temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return RopeConfig(
            rope_type="yarn",
            theta=theta,
            rotary_dim=rotary_dim,
            factor=factor,
            original_max_position_embeddings=values.integer(
                "rope.scaling.original_context_length", context_length
            ),
            attention_factor=temperature * values.number("rope.scaling.attn_factor", 1.0),
            beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    if scaling not in ("none", "linear"):
        raise ModelLoadError(
            f"{values.file.path}: rope scaling {scaling!r} is not supported; supported are none, linear, "
            "yarn."
        )
    return RopeConfig(
        rope_type="linear" if factor != 1 else "default",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        frequency_factors=_frequency_factors(values.file, rotary_dim),
    )


def _frequency_factors(file: GGUFFile, rotary_dim: int) -> tuple[float, ...] | None:
    """The tensor in which llama.cpp's converter writes down Llama 3's scaling, one divisor a frequency."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.num_elements != rotary_dim // 2:
        raise ModelLoadError(
            f"The tensor rope_freqs.weight in {file.path} has {tensor.num_elements} elements; by the "
            f"metadata it must have {rotary_dim // 2}."
        )
    return tuple(read_tensor(map_data(file), file, tensor).ravel().tolist())


def _eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message, in this order, those that are set."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return tuple(dict.fromkeys(value for value in ids if isinstance(value, int) and value >= 0))
