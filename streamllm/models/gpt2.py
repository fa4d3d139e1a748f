"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each block, an MLP with one activation,
biases everywhere.

Its folders hold the layers' matrices as ``[inputs, outputs]``, its GGUFs the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamllm.errors import ModelLoadError
from streamllm.models import gguf_config, hf_config
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.config_fields import ConfigFields
from streamllm.models.decoder import AttentionBlock, attend
from streamllm.models.gguf_config import GGUFFields
from streamllm.models.hf_config import ACTIVATIONS, Defaults
from streamllm.models.model_config import ModelConfig
from streamllm.models.stored_layout import Sources, StoredLayout
from streamllm.models.tensor_source import TensorPart
from streamllm.models.weights import WeightLoader
from streamllm.ops import Activation, Attention, Batch, Buffer, LayerNorm, Matrix, Ops

GGUF_NAMES: Mapping[str, str] = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "blk": "transformer.h",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_DEFAULTS = Defaults(1024, bos_token_id=50256, eos_token_id=50256, tie_word_embeddings=True)


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    """
    Attributes:
        inner_size: width of the MLP.
        layer_norm_eps: added to the variance in every LayerNorm.
        activation: of the MLP.
        layer_scales: for each layer the factor of its attention's scores.
        transposed: the layers' matrices are stored ``[inputs, outputs]``.
    """

    inner_size: int
    layer_norm_eps: float
    activation: Activation
    layer_scales: tuple[float, ...]
    transposed: bool


def read_config(fields: ConfigFields, architecture: str) -> GPT2Config:
    fields = fields.with_aliases(_ALIASES)
    if fields.flag("add_cross_attention"):
        raise ModelLoadError(f"{fields.path}: GPT-2 with add_cross_attention is not supported.")
    common = hf_config.read_common(fields, architecture, _DEFAULTS)
    scale = common["head_dim"] ** -0.5 if fields.flag("scale_attn_weights", True) else 1.0
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx")
    return GPT2Config(
        **common,
        ropes=(),
        layer_windows=(None,) * common["num_layers"],
        inner_size=fields.integer("n_inner", 4 * common["hidden_size"]),
        layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.choice("activation_function", "gelu_new", ACTIVATIONS),
        layer_scales=tuple(
            scale / (layer + 1) if by_layer else scale for layer in range(common["num_layers"])
        ),
        transposed=True,
    )


def read_gguf_config(fields: GGUFFields, architecture: str) -> GPT2Config:
    common: dict[str, Any] = gguf_config.read_common(fields, architecture)
    return GPT2Config(
        **common,
        ropes=(),
        layer_windows=(None,) * common["num_layers"],
        inner_size=fields.integer("feed_forward_length"),
        layer_norm_eps=fields.number("attention.layer_norm_epsilon"),
        activation="gelu_tanh",
        layer_scales=(common["head_dim"] ** -0.5,) * common["num_layers"],
        transposed=False,
    )


def _matrices(config: GPT2Config, index: int) -> dict[str, tuple[int, int]]:
    """The matrices of a layer, as [outputs, inputs]."""
    prefix, hidden, inner = f"transformer.h.{index}", config.hidden_size, config.inner_size
    return {
        f"{prefix}.attn.c_attn": (3 * hidden, hidden),
        f"{prefix}.attn.c_proj": (hidden, hidden),
        f"{prefix}.mlp.c_fc": (inner, hidden),
        f"{prefix}.mlp.c_proj": (hidden, inner),
    }


def _sources(config: GPT2Config, checkpoint: Checkpoint) -> Sources:
    if not config.transposed:
        return {}
    return {
        f"{name}.weight": TensorPart(f"{name}.weight", shape[::-1], transposed=True)
        for index in range(config.num_layers)
        for name, shape in _matrices(config, index).items()
    }


STORED = StoredLayout(
    embedding="transformer.wte.weight",
    prefixes={name: f"transformer.{name}" for name in ("wte.", "wpe.", "h.", "ln_f.")},
    sources=_sources,
)


@dataclass(frozen=True)
class GPT2Layer:
    """Weights of one layer."""

    attention_norm: LayerNorm
    attention: AttentionBlock
    mlp_norm: LayerNorm
    fc: Matrix
    activation: Activation
    out: Matrix


@dataclass(frozen=True)
class GPT2Model:
    """Weights of a model. With tied embeddings ``embed`` and ``lm_head`` are one object."""

    embed: Matrix
    positions: Matrix
    layers: tuple[GPT2Layer, ...]
    norm: LayerNorm
    lm_head: Matrix


def forward(model: GPT2Model, ops: Ops, batch: Batch) -> Buffer:
    """The hidden state after the final norm of every token: ``[tokens, hidden_size]``."""
    hidden = ops.add(ops.embedding(batch, model.embed), ops.position_embedding(batch, model.positions))
    residual = None
    for layer in model.layers:
        x, residual = ops.layer_norm(hidden, layer.attention_norm, residual)
        hidden = attend(layer.attention, ops, batch, x)
        x, residual = ops.layer_norm(hidden, layer.mlp_norm, residual)
        hidden = ops.linear(ops.activate(ops.linear(x, layer.fc), layer.activation), layer.out)
    return ops.layer_norm(hidden, model.norm, residual)[0]


def logits(model: GPT2Model, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    return ops.linear(hidden, model.lm_head)


def load_weights(loader: WeightLoader, config: GPT2Config) -> GPT2Model:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    embed = loader.linear([("transformer.wte", vocab)], hidden)
    return GPT2Model(
        embed=embed,
        positions=loader.linear([("transformer.wpe", config.max_position_embeddings)], hidden),
        layers=tuple(_load_layer(loader, config, index) for index in range(config.num_layers)),
        norm=loader.layer_norm("transformer.ln_f", hidden, config.layer_norm_eps),
        lm_head=embed if config.tie_word_embeddings else loader.linear([("lm_head", vocab)], hidden),
    )


def _load_layer(loader: WeightLoader, config: GPT2Config, index: int) -> GPT2Layer:
    prefix, hidden, eps = f"transformer.h.{index}", config.hidden_size, config.layer_norm_eps
    group, place = config.kv_layout.places[index]
    qkv, attention_out, fc, out = (
        loader.linear([(name, rows)], columns, bias=True)
        for name, (rows, columns) in _matrices(config, index).items()
    )
    attention = Attention(
        group=group,
        place=place,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=0,
        scale=config.layer_scales[index],
    )
    return GPT2Layer(
        attention_norm=loader.layer_norm(f"{prefix}.ln_1", hidden, eps),
        attention=AttentionBlock(qkv, attention, attention_out),
        mlp_norm=loader.layer_norm(f"{prefix}.ln_2", hidden, eps),
        fc=fc,
        activation=config.activation,
        out=out,
    )
