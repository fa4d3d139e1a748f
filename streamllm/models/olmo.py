"""OLMo 2 and OLMo 3: norms after attention and MLP, not before them, and over all heads of q and k together.

OLMo 3 has windows in most layers, and scales the rotary embedding of the others alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    load_mlp,
)
from streamllm.models.gguf_config import GGUFFields
from streamllm.models.hf_config import ACTIVATIONS, Defaults
from streamllm.models.weights import WeightLoader
from streamllm.ops import Batch, Buffer, Matrix, Ops, RMSNorm

GGUF_NAMES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_DEFAULTS = Defaults(2048, eos_token_id=50279)


def read_config(fields: ConfigFields, architecture: str) -> DecoderConfig:
    common = hf_config.read_common(fields, architecture, _DEFAULTS)
    head_dim, max_length = common["head_dim"], common["max_position_embeddings"]
    attention_bias = fields.flag("attention_bias")
    layer_windows: tuple[int | None, ...] = (None,) * common["num_layers"]
    if architecture == "Olmo3ForCausalLM":
        layer_windows = hf_config.read_alternating_windows(
            fields, hf_config.read_window(fields, 4096), common["num_layers"], period=4
        )
        theta = fields.number("rope_theta", 500000.0)
        ropes = hf_config.read_ropes_by_layer_type(
            fields, head_dim, max_length, full_theta=theta, sliding_theta=theta
        )
    else:
        ropes = (hf_config.read_rope(fields, head_dim, max_length),) * 2
    return DecoderConfig(
        **common,
        ropes=ropes,
        layer_ropes=_layer_ropes(layer_windows),
        layer_windows=layer_windows,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        hidden_act=fields.choice("hidden_act", "silu", ACTIVATIONS),
    )


def read_gguf_config(fields: GGUFFields, architecture: str) -> DecoderConfig:
    common = gguf_config.read_common(fields, architecture)
    layer_windows = gguf_config.read_layer_windows(fields, common["num_layers"], period=4)
    rope = gguf_config.read_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return DecoderConfig(
        **common,
        ropes=(rope, gguf_config.read_sliding_rope(fields, rope, rope.theta)),
        layer_ropes=_layer_ropes(layer_windows),
        layer_windows=layer_windows,
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
    )


def _layer_ropes(windows: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(0 if window is None else 1 for window in windows)


@dataclass(frozen=True)
class OlmoLayer:
    """Weights of one layer."""

    attention: AttentionBlock
    post_attention_norm: RMSNorm
    mlp: GatedMLP
    post_feedforward_norm: RMSNorm


@dataclass(frozen=True)
class OlmoModel:
    """Weights of a model. With tied embeddings ``embed`` and ``lm_head`` are one object."""

    embed: Matrix
    layers: tuple[OlmoLayer, ...]
    norm: RMSNorm
    lm_head: Matrix


def forward(model: OlmoModel, ops: Ops, batch: Batch) -> Buffer:
    """The hidden state after the final norm of every token in the batch: ``[tokens, hidden_size]``."""
    residual = ops.embedding(batch, model.embed)
    for layer in model.layers:
        hidden, _ = ops.rms_norm(attend(layer.attention, ops, batch, residual), layer.post_attention_norm)
        residual = ops.add(hidden, residual)
        hidden, _ = ops.rms_norm(feed_forward(layer.mlp, ops, residual), layer.post_feedforward_norm)
        residual = ops.add(hidden, residual)
    return ops.rms_norm(residual, model.norm)[0]


def logits(model: OlmoModel, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    return ops.linear(hidden, model.lm_head)


def load_weights(loader: WeightLoader, config: DecoderConfig) -> OlmoModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    embed = load_embedding(loader, config)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    norm = loader.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps)
    return OlmoModel(embed, layers, norm, load_head(loader, config, embed))


def _load_layer(loader: WeightLoader, config: DecoderConfig, index: int) -> OlmoLayer:
    prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
    q_norm = loader.rms_norm(f"{prefix}.self_attn.q_norm", config.q_width, eps)
    k_norm = loader.rms_norm(f"{prefix}.self_attn.k_norm", config.kv_width, eps)
    return OlmoLayer(
        attention=load_attention(loader, config, index, q_norm=q_norm, k_norm=k_norm),
        post_attention_norm=loader.rms_norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        mlp=load_mlp(loader, config, index),
        post_feedforward_norm=loader.rms_norm(f"{prefix}.post_feedforward_layernorm", hidden, eps),
    )
