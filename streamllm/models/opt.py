"""OPT (Zhang et al. 2022): learned positions, LayerNorm, an MLP with one activation, biases.

The 350m model norms after each block instead of before, and embeds tokens in fewer dimensions than it
computes in.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamllm.models import hf_config
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.config_fields import ConfigFields
from streamllm.models.decoder import AttentionBlock, attend
from streamllm.models.hf_config import ACTIVATIONS, Defaults
from streamllm.models.model_config import ModelConfig
from streamllm.models.stored_layout import Sources, StoredLayout
from streamllm.models.tensor_source import TensorPart
from streamllm.models.weights import WeightLoader
from streamllm.ops import Activation, Attention, Batch, Buffer, LayerNorm, Matrix, Ops

_DEFAULTS = Defaults(2048, bos_token_id=2, eos_token_id=2, tie_word_embeddings=True)
_EPS = 1e-5
_FIRST_POSITION = 2
"""The row of the position table that belongs to position 0."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """
    Attributes:
        ffn_dim: width of the MLP.
        embedding_size: width of the token embedding and of the head (``word_embed_proj_dim``).
        norm_before: the norms stand before attention and MLP; otherwise after them.
        final_norm: there is a norm behind the last layer.
        norm_affine: the norms have weights and biases.
        bias: the projections have biases.
        activation: of the MLP.
    """

    ffn_dim: int
    embedding_size: int
    norm_before: bool
    final_norm: bool
    norm_affine: bool
    bias: bool
    activation: Activation


def read_config(fields: ConfigFields, architecture: str) -> OPTConfig:
    common = hf_config.read_common(fields, architecture, _DEFAULTS)
    norm_before = fields.flag("do_layer_norm_before", True)
    return OPTConfig(
        **common,
        ropes=(),
        layer_windows=(None,) * common["num_layers"],
        ffn_dim=fields.integer("ffn_dim"),
        embedding_size=fields.integer("word_embed_proj_dim", common["hidden_size"]),
        norm_before=norm_before,
        final_norm=norm_before and not fields.flag("_remove_final_layer_norm"),
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        bias=fields.flag("enable_bias", True),
        activation=fields.choice("activation_function", "relu", ACTIVATIONS),
    )


def _sources(config: OPTConfig, checkpoint: Checkpoint) -> Sources:
    name = "model.decoder.embed_positions.weight"
    shape = (config.max_position_embeddings + _FIRST_POSITION, config.hidden_size)
    return {name: TensorPart(name, shape, rows=slice(_FIRST_POSITION, None))}


STORED = StoredLayout(
    embedding="model.decoder.embed_tokens.weight",
    prefixes={"decoder.": "model.decoder."},
    sources=_sources,
)


@dataclass(frozen=True)
class OPTLayer:
    """Weights of one layer."""

    attention_norm: LayerNorm
    attention: AttentionBlock
    mlp_norm: LayerNorm
    fc1: Matrix
    fc2: Matrix


@dataclass(frozen=True)
class OPTModel:
    """Weights of a model. With tied embeddings ``embed`` and ``lm_head`` are one object; ``project_in`` and
    ``project_out`` are there where they are narrower than the layers."""

    embed: Matrix
    positions: Matrix
    project_in: Matrix | None
    layers: tuple[OPTLayer, ...]
    norm_before: bool
    activation: Activation
    norm: LayerNorm | None
    project_out: Matrix | None
    lm_head: Matrix


def forward(model: OPTModel, ops: Ops, batch: Batch) -> Buffer:
    """The hidden state after the last norm of every token: ``[tokens, hidden_size]``."""
    hidden = ops.embedding(batch, model.embed)
    if model.project_in is not None:
        hidden = ops.linear(hidden, model.project_in)
    hidden = ops.add(hidden, ops.position_embedding(batch, model.positions))
    return (_pre_norm if model.norm_before else _post_norm)(model, ops, batch, hidden)


def _pre_norm(model: OPTModel, ops: Ops, batch: Batch, hidden: Buffer) -> Buffer:
    residual = None
    for layer in model.layers:
        x, residual = ops.layer_norm(hidden, layer.attention_norm, residual)
        hidden = attend(layer.attention, ops, batch, x)
        x, residual = ops.layer_norm(hidden, layer.mlp_norm, residual)
        hidden = _feed_forward(model, layer, ops, x)
    if model.norm is None:
        return ops.add(hidden, residual)
    return ops.layer_norm(hidden, model.norm, residual)[0]


def _post_norm(model: OPTModel, ops: Ops, batch: Batch, hidden: Buffer) -> Buffer:
    for layer in model.layers:
        x = attend(layer.attention, ops, batch, hidden)
        hidden, _ = ops.layer_norm(x, layer.attention_norm, hidden)
        x = _feed_forward(model, layer, ops, hidden)
        hidden, _ = ops.layer_norm(x, layer.mlp_norm, hidden)
    return hidden


def _feed_forward(model: OPTModel, layer: OPTLayer, ops: Ops, x: Buffer) -> Buffer:
    return ops.linear(ops.activate(ops.linear(x, layer.fc1), model.activation), layer.fc2)


def logits(model: OPTModel, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    if model.project_out is not None:
        hidden = ops.linear(hidden, model.project_out)
    return ops.linear(hidden, model.lm_head)


def load_weights(loader: WeightLoader, config: OPTConfig) -> OPTModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    prefix, hidden, inner = "model.decoder", config.hidden_size, config.embedding_size
    projected = inner != hidden
    embed = loader.linear([(f"{prefix}.embed_tokens", config.vocab_size)], inner)
    return OPTModel(
        embed=embed,
        positions=loader.linear([(f"{prefix}.embed_positions", config.max_position_embeddings)], hidden),
        project_in=loader.linear([(f"{prefix}.project_in", hidden)], inner) if projected else None,
        layers=tuple(_load_layer(loader, config, index) for index in range(config.num_layers)),
        norm_before=config.norm_before,
        activation=config.activation,
        norm=_load_norm(loader, config, f"{prefix}.final_layer_norm") if config.final_norm else None,
        project_out=loader.linear([(f"{prefix}.project_out", inner)], hidden) if projected else None,
        lm_head=embed
        if config.tie_word_embeddings
        else loader.linear([("lm_head", config.vocab_size)], inner),
    )


def _load_norm(loader: WeightLoader, config: OPTConfig, name: str) -> LayerNorm:
    return loader.layer_norm(name, config.hidden_size, _EPS, affine=config.norm_affine)


def _load_layer(loader: WeightLoader, config: OPTConfig, index: int) -> OPTLayer:
    prefix, hidden, bias = f"model.decoder.layers.{index}", config.hidden_size, config.bias
    group, place = config.kv_layout.places[index]
    self_attn = f"{prefix}.self_attn"
    attention = Attention(
        group=group,
        place=place,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=0,
        scale=config.head_dim**-0.5,
    )
    return OPTLayer(
        attention_norm=_load_norm(loader, config, f"{prefix}.self_attn_layer_norm"),
        attention=AttentionBlock(
            qkv=loader.linear([(f"{self_attn}.{part}_proj", hidden) for part in "qkv"], hidden, bias=bias),
            attention=attention,
            out=loader.linear([(f"{self_attn}.out_proj", hidden)], hidden, bias=bias),
        ),
        mlp_norm=_load_norm(loader, config, f"{prefix}.final_layer_norm"),
        fc1=loader.linear([(f"{prefix}.fc1", config.ffn_dim)], hidden, bias=bias),
        fc2=loader.linear([(f"{prefix}.fc2", hidden)], config.ffn_dim, bias=bias),
    )
