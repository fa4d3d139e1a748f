"""Llama and what shares its layout: Llama 2 and 3, Mistral, Ministral, Qwen2, Qwen3, SmolLM2, SmolLM3.

What tells them apart are fields of the config: biases on q, k and v (Qwen2), norms over each head of q and k
(Qwen3), windows (Mistral; of some layers: Ministral), layers that do not rotate (SmolLM3), tied embeddings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamllm.models import gguf_config, hf_config
from streamllm.models.config_fields import ConfigFields
from streamllm.models.decoder import (
    AttentionBlock,
    DecoderConfig,
    GatedMLP,
    attend,
    feed_forward,
    load_attention,
    load_embedding,
    load_head,
    load_head_norms,
    load_mlp,
)
from streamllm.models.gguf_config import GGUFFields
from streamllm.models.hf_config import ACTIVATIONS, Defaults
from streamllm.models.weights import WeightLoader
from streamllm.ops import Batch, Buffer, Matrix, Ops, RMSNorm

logger = logging.getLogger("streamllm.models")

GGUF_NAMES: Mapping[str, str] = {}

_DEFAULTS = {
    "LlamaForCausalLM": Defaults(2048, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": Defaults(131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2),
    "MinistralForCausalLM": Defaults(131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2),
    "Ministral3ForCausalLM": Defaults(262144, num_kv_heads=8, bos_token_id=1, eos_token_id=2, head_dim=128),
    "Qwen2ForCausalLM": Defaults(32768, num_kv_heads=32),
    "Qwen3ForCausalLM": Defaults(32768, num_kv_heads=32, head_dim=128),
    "SmolLM3ForCausalLM": Defaults(
        32768, num_kv_heads=4, bos_token_id=128000, eos_token_id=128001, tie_word_embeddings=True
    ),
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What transformers takes for an absent ``rope_parameters``."""
_NO_ROPE_INTERVAL = 4
"""SmolLM3: every so many layers one does not rotate; a GGUF does not say it."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """
    Attributes:
        qk_norm: queries and keys pass an RMSNorm over each head before the rotation.
        scaled_queries_from: the position from which Ministral 3 multiplies queries by a factor that grows
            with it. That is not computed: the context ends there.
    """

    qk_norm: bool = False
    scaled_queries_from: int | None = None

    @property
    def context_length(self) -> int:
        length = super().context_length
        return length if self.scaled_queries_from is None else min(length, self.scaled_queries_from)


def read_config(fields: ConfigFields, architecture: str) -> LlamaConfig:
    if architecture == "Ministral3ForCausalLM" and not fields.get("rope_parameters"):
        fields = ConfigFields(fields.path, {**fields.values, "rope_parameters": _MINISTRAL3_ROPE})
    common = hf_config.read_common(fields, architecture, _DEFAULTS[architecture])
    num_layers = common["num_layers"]
    has_bias_flag = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM")
    attention_bias = has_bias_flag and fields.flag("attention_bias")
    has_mlp_bias_flag = architecture in ("LlamaForCausalLM", "SmolLM3ForCausalLM")
    layer_ropes = _smollm3_ropes(fields, num_layers) if architecture == "SmolLM3ForCausalLM" else None
    default_theta = 2000000.0 if architecture == "SmolLM3ForCausalLM" else 10000.0
    ropes = (
        hf_config.read_rope(
            fields, common["head_dim"], common["max_position_embeddings"], default_theta=default_theta
        ),
    )
    return LlamaConfig(
        **common,
        ropes=ropes,
        layer_ropes=layer_ropes,
        layer_windows=_layer_windows(fields, architecture, num_layers, layer_ropes),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if architecture == "Ministral3ForCausalLM" else 1e-6),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=attention_bias,
        mlp_bias=has_mlp_bias_flag and fields.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        hidden_act=fields.choice("hidden_act", "silu", ACTIVATIONS),
        scaled_queries_from=_scaled_queries_from(fields, ropes[0].original_max_position_embeddings),
    )


def _layer_windows(
    fields: ConfigFields, architecture: str, num_layers: int, layer_ropes: tuple[int | None, ...] | None
) -> tuple[int | None, ...]:
    """Which layers see only a window. Llama has none; Mistral's have the same unless ``layer_types`` makes
    it a Ministral by another name; others choose."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    has_default = architecture not in ("Ministral3ForCausalLM", "SmolLM3ForCausalLM")
    window = hf_config.read_window(fields, 4096 if has_default else None)
    if architecture == "Ministral3ForCausalLM":
        return (window,) * num_layers
    if architecture.startswith("Qwen") and not fields.flag("use_sliding_window"):
        window = None
    listed = hf_config.read_layer_windows(fields, window, num_layers)
    if listed is not None:
        return listed
    if architecture in ("MistralForCausalLM", "MinistralForCausalLM"):
        return (window,) * num_layers
    if layer_ropes is not None:
        window = window if fields.flag("use_sliding_window") else None
        return tuple(window if rope is None else None for rope in layer_ropes)
    first = fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.wrong("max_window_layers", "an integer")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _smollm3_ropes(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """By ``no_rope_layers``, where 0 marks a layer without rotation, or ``no_rope_layer_interval``."""
    marks = fields.get("no_rope_layers")
    if marks is None:
        interval = fields.integer("no_rope_layer_interval", _NO_ROPE_INTERVAL)
        return tuple(0 if (layer + 1) % interval else None for layer in range(num_layers))
    if not isinstance(marks, list) or len(marks) < num_layers or any(mark not in (0, 1) for mark in marks):
        raise fields.wrong("no_rope_layers", f"a list with 0 or 1 for each of the {num_layers} layers")
    return tuple(0 if mark else None for mark in marks[:num_layers])


def _scaled_queries_from(fields: ConfigFields, trained_length: int) -> int | None:
    parameters = fields.get("rope_parameters")
    if not isinstance(parameters, dict) or not parameters.get("llama_4_scaling_beta"):
        return None
    return _end_context_at(trained_length)


def _end_context_at(length: int) -> int:
    logger.warning(
        "the context is limited to %d tokens: how this model scales queries beyond is not implemented", length
    )
    return length


def read_gguf_config(fields: GGUFFields, architecture: str) -> LlamaConfig:
    common: dict[str, Any] = gguf_config.read_common(fields, architecture)
    num_layers = common["num_layers"]
    window = fields.number("attention.sliding_window", 0)
    rope = gguf_config.read_rope(fields, common["head_dim"], common["max_position_embeddings"])
    layer_ropes = None
    if architecture == "SmolLM3ForCausalLM":
        layer_ropes = tuple(0 if (layer + 1) % _NO_ROPE_INTERVAL else None for layer in range(num_layers))
    scaled_queries_from = None
    if fields.number("attention.temperature_scale", 0):
        scaled_queries_from = _end_context_at(rope.original_max_position_embeddings)
    return LlamaConfig(
        **common,
        ropes=(rope,),
        layer_ropes=layer_ropes,
        layer_windows=(int(window) or None,) * num_layers,
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        qkv_bias=fields.has_tensor("blk.0.attn_q.bias"),
        attention_out_bias=fields.has_tensor("blk.0.attn_output.bias"),
        mlp_bias=fields.has_tensor("blk.0.ffn_gate.bias"),
        qk_norm=fields.has_tensor("blk.0.attn_q_norm.weight"),
        scaled_queries_from=scaled_queries_from,
    )


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer."""

    input_norm: RMSNorm
    attention: AttentionBlock
    post_attention_norm: RMSNorm
    mlp: GatedMLP


@dataclass(frozen=True)
class LlamaModel:
    """Weights of a model. With tied embeddings ``embed`` and ``lm_head`` are one object."""

    embed: Matrix
    layers: tuple[LlamaLayer, ...]
    norm: RMSNorm
    lm_head: Matrix


def forward(model: LlamaModel, ops: Ops, batch: Batch) -> Buffer:
    """The hidden state after the final norm of every token in the batch: ``[tokens, hidden_size]``."""
    hidden, residual = ops.embedding(batch, model.embed), None
    for layer in model.layers:
        x, residual = ops.rms_norm(hidden, layer.input_norm, residual)
        hidden = attend(layer.attention, ops, batch, x)
        x, residual = ops.rms_norm(hidden, layer.post_attention_norm, residual)
        hidden = feed_forward(layer.mlp, ops, x)
    return ops.rms_norm(hidden, model.norm, residual)[0]


def logits(model: LlamaModel, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    return ops.linear(hidden, model.lm_head)


def load_weights(loader: WeightLoader, config: LlamaConfig) -> LlamaModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    embed = load_embedding(loader, config)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    norm = loader.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps)
    return LlamaModel(embed, layers, norm, load_head(loader, config, embed))


def _load_layer(loader: WeightLoader, config: LlamaConfig, index: int) -> LlamaLayer:
    prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
    q_norm, k_norm = load_head_norms(loader, config, index) if config.qk_norm else (None, None)
    return LlamaLayer(
        input_norm=loader.rms_norm(f"{prefix}.input_layernorm", hidden, eps),
        attention=load_attention(loader, config, index, q_norm=q_norm, k_norm=k_norm),
        post_attention_norm=loader.rms_norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        mlp=load_mlp(loader, config, index),
    )
