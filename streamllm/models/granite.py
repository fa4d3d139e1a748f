"""Granite 3 and 4 (dense): Llama's layers, with factors on embeddings, scores, what a layer adds, and logits.

Granite 4's architecture has room for Mamba layers and experts; its models with neither are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamllm.models import gguf_config, hf_config
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.config_fields import ConfigFields
from streamllm.models.decoder import (
    DecoderConfig,
    attend,
    feed_forward,
    load_attention,
    load_embedding,
    load_head,
    load_mlp,
)
from streamllm.models.gguf_config import GGUFFields
from streamllm.models.hf_config import ACTIVATIONS, Defaults
from streamllm.models.llama import LlamaLayer
from streamllm.models.stored_layout import Sources, StoredLayout
from streamllm.models.tensor_source import TensorPart
from streamllm.models.weights import WeightLoader
from streamllm.ops import Batch, Buffer, Matrix, Ops, RMSNorm

GGUF_NAMES: Mapping[str, str] = {}

_DEFAULTS = Defaults(2048, bos_token_id=1, eos_token_id=2)
_GRANITE4 = "GraniteMoeHybridForCausalLM"


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """
    Attributes:
        embedding_multiplier: of the embedding's rows.
        attention_multiplier: of the scores.
        residual_multiplier: of what attention and MLP add.
        logits_scaling: what the logits are divided by.
    """

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def read_config(fields: ConfigFields, architecture: str) -> GraniteConfig:
    is_granite4 = architecture == _GRANITE4
    if is_granite4:
        _check_dense(fields)
    common = hf_config.read_common(fields, architecture, _DEFAULTS)
    has_rope = not is_granite4 or fields.get("position_embedding_type") == "rope"
    attention_bias = fields.flag("attention_bias")
    return GraniteConfig(
        **common,
        ropes=(hf_config.read_rope(fields, common["head_dim"], common["max_position_embeddings"]),),
        layer_ropes=None if has_rope else (None,) * common["num_layers"],
        layer_windows=(None,) * common["num_layers"],
        intermediate_size=fields.integer("shared_intermediate_size", 1024)
        if is_granite4
        else fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=not is_granite4 and fields.flag("mlp_bias"),
        hidden_act=fields.choice("hidden_act", "silu", ACTIVATIONS),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        attention_multiplier=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_scaling=fields.number("logits_scaling", 1.0),
    )


def _check_dense(fields: ConfigFields) -> None:
    """
    Raises:
        ModelLoadError: a Granite 4 has layers or experts that are not supported.
    """
    fields = fields.with_aliases({"layer_types": "layers_block_type"})
    layer_types = fields.get("layer_types")
    if not isinstance(layer_types, list) or not set(map(str, layer_types)) <= {"attention", "full_attention"}:
        raise fields.wrong("layer_types", "a list of attention alone: Mamba layers are not supported")
    if fields.get("num_local_experts", 8):
        raise fields.wrong("num_local_experts", "0: experts are not supported here")


def _sources(config: GraniteConfig, checkpoint: Checkpoint) -> Sources:
    """Granite 4's MLP, which keeps the names that it has beside experts."""
    if config.architecture != _GRANITE4:
        return {}
    hidden, inner = config.hidden_size, config.intermediate_size
    sources: Sources = {}
    for index in range(config.num_layers):
        mlp, stored = f"model.layers.{index}.mlp", f"model.layers.{index}.shared_mlp"
        for half, name in enumerate(("gate_proj", "up_proj")):
            sources[f"{mlp}.{name}.weight"] = TensorPart(
                f"{stored}.input_linear.weight",
                (2 * inner, hidden),
                rows=slice(half * inner, (half + 1) * inner),
            )
        sources[f"{mlp}.down_proj.weight"] = TensorPart(f"{stored}.output_linear.weight", (hidden, inner))
    return sources


STORED = StoredLayout(sources=_sources)


def read_gguf_config(fields: GGUFFields, architecture: str) -> GraniteConfig:
    common = gguf_config.read_common(fields, architecture)
    # As in llama.cpp, 0 stands for a factor that the file does not set.
    return GraniteConfig(
        **common,
        ropes=(gguf_config.read_rope(fields, common["head_dim"], common["max_position_embeddings"]),),
        layer_windows=(None,) * common["num_layers"],
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        qkv_bias=fields.has_tensor("blk.0.attn_q.bias"),
        attention_out_bias=fields.has_tensor("blk.0.attn_output.bias"),
        mlp_bias=fields.has_tensor("blk.0.ffn_gate.bias"),
        embedding_multiplier=fields.number("embedding_scale", 0) or 1.0,
        attention_multiplier=fields.number("attention.scale", 0) or common["head_dim"] ** -0.5,
        residual_multiplier=fields.number("residual_scale", 0) or 1.0,
        logits_scaling=fields.number("logit_scale", 0) or 1.0,
    )


@dataclass(frozen=True)
class GraniteModel:
    """Weights of a model, and its factors. With tied embeddings ``embed`` and ``lm_head`` are one object."""

    embed: Matrix
    layers: tuple[LlamaLayer, ...]
    norm: RMSNorm
    lm_head: Matrix
    config: GraniteConfig


def forward(model: GraniteModel, ops: Ops, batch: Batch) -> Buffer:
    """The hidden state after the final norm of every token in the batch: ``[tokens, hidden_size]``."""
    share = model.config.residual_multiplier
    hidden, residual = ops.embedding(batch, model.embed), None
    hidden = ops.scale(hidden, model.config.embedding_multiplier)
    for layer in model.layers:
        x, residual = ops.rms_norm(hidden, layer.input_norm, residual)
        hidden = ops.scale(attend(layer.attention, ops, batch, x), share)
        x, residual = ops.rms_norm(hidden, layer.post_attention_norm, residual)
        hidden = ops.scale(feed_forward(layer.mlp, ops, x), share)
    return ops.rms_norm(hidden, model.norm, residual)[0]


def logits(model: GraniteModel, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    return ops.scale(ops.linear(hidden, model.lm_head), 1 / model.config.logits_scaling)


def load_weights(loader: WeightLoader, config: GraniteConfig) -> GraniteModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    embed = load_embedding(loader, config)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    norm = loader.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps)
    return GraniteModel(embed, layers, norm, load_head(loader, config, embed), config)


def _load_layer(loader: WeightLoader, config: GraniteConfig, index: int) -> LlamaLayer:
    prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
    return LlamaLayer(
        input_norm=loader.rms_norm(f"{prefix}.input_layernorm", hidden, eps),
        attention=load_attention(loader, config, index, scale=config.attention_multiplier),
        post_attention_norm=loader.rms_norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        mlp=load_mlp(loader, config, index),
    )
