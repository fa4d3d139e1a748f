"""Gemma 2 and Gemma 3: scaled embeddings, norms before and after attention and MLP, windows in most layers.

Gemma 2 caps the scores of the attention and the logits softly. Gemma 3 has norms over each head of q and k
instead, and two rotary embeddings: layers with a window keep the one of short texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamllm.errors import ModelLoadError
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
from streamllm.models.model_config import RopeConfig
from streamllm.models.weights import WeightLoader
from streamllm.ops import Batch, Buffer, Matrix, Ops, RMSNorm

GGUF_NAMES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_DEFAULTS = {
    "Gemma2ForCausalLM": Defaults(
        8192,
        num_kv_heads=4,
        bos_token_id=2,
        eos_token_id=1,
        head_dim=256,
        tie_word_embeddings=True,
        vocab_size=256000,
        num_heads=8,
    ),
    "Gemma3ForCausalLM": Defaults(
        131072,
        num_kv_heads=4,
        bos_token_id=2,
        eos_token_id=1,
        head_dim=256,
        tie_word_embeddings=True,
        vocab_size=262208,
        num_heads=8,
    ),
}
_LARGEST_LAYERS = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}
"""Layers of the 27B models, whose scores are scaled by the hidden size shared by the heads. A GGUF does not
say it; llama.cpp tells them the same way."""
_LOCAL_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """
    Attributes:
        qk_norm: queries and keys pass an RMSNorm over each head before the rotation.
        norm_offset: added to the norms' stored factors: 1, or 0 where the file holds the sum (GGUF).
        attention_scale: of the scores.
        attention_soft_cap: of the scores; 0 for none.
        logit_soft_cap: of the logits; 0 for none.
    """

    qk_norm: bool
    norm_offset: float
    attention_scale: float
    attention_soft_cap: float
    logit_soft_cap: float

    @property
    def context_length(self) -> int:
        """The scaling of Gemma 3's global rotary embedding is counted in already."""
        return self.max_position_embeddings


def read_config(fields: ConfigFields, architecture: str) -> GemmaConfig:
    if fields.flag("use_bidirectional_attention"):
        raise ModelLoadError(
            f"{fields.path}: use_bidirectional_attention is not supported: this is no model that generates."
        )
    common = hf_config.read_common(fields, architecture, _DEFAULTS[architecture])
    is_gemma2 = architecture == "Gemma2ForCausalLM"
    period = 2 if is_gemma2 else fields.integer("sliding_window_pattern", 6)
    layer_windows = hf_config.read_alternating_windows(
        fields, hf_config.read_window(fields, 4096), common["num_layers"], period=period
    )
    attention_bias = fields.flag("attention_bias")
    ropes = _read_ropes(fields, common["head_dim"], common["max_position_embeddings"], is_gemma2)
    return GemmaConfig(
        **common,
        ropes=ropes,
        layer_ropes=_layer_ropes(ropes, layer_windows),
        layer_windows=layer_windows,
        intermediate_size=fields.integer("intermediate_size", 9216),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        hidden_act=fields.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        qk_norm=not is_gemma2,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0) if is_gemma2 else 0.0,
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0 if is_gemma2 else 0.0),
    )


def _read_ropes(
    fields: ConfigFields, head_dim: int, max_position_embeddings: int, is_gemma2: bool
) -> tuple[RopeConfig, ...]:
    if is_gemma2:
        return (hf_config.read_rope(fields, head_dim, max_position_embeddings),)
    return hf_config.read_ropes_by_layer_type(
        fields,
        head_dim,
        max_position_embeddings,
        full_theta=fields.number("rope_theta", 1000000.0),
        sliding_theta=fields.number("rope_local_base_freq", _LOCAL_THETA),
    )


def _layer_ropes(ropes: tuple[RopeConfig, ...], windows: tuple[int | None, ...]) -> tuple[int, ...] | None:
    return None if len(ropes) == 1 else tuple(0 if window is None else 1 for window in windows)


def _soft_cap(fields: ConfigFields, name: str, default: float) -> float:
    """A null says that there is none."""
    cap: float = fields.number(name, 0.0 if fields.has(name) else default)
    return cap


def read_gguf_config(fields: GGUFFields, architecture: str) -> GemmaConfig:
    common = gguf_config.read_common(fields, architecture)
    num_layers, head_dim = common["num_layers"], common["head_dim"]
    is_gemma2 = architecture == "Gemma2ForCausalLM"
    layer_windows = gguf_config.read_layer_windows(
        fields, num_layers, period=2 if is_gemma2 else 6, default_window=4096 if is_gemma2 else 0
    )
    rope = gguf_config.read_rope(fields, head_dim, common["max_position_embeddings"])
    ropes = (rope,) if is_gemma2 else (rope, gguf_config.read_sliding_rope(fields, rope, _LOCAL_THETA))
    is_largest = num_layers == _LARGEST_LAYERS[architecture]
    return GemmaConfig(
        **common,
        ropes=ropes,
        layer_ropes=_layer_ropes(ropes, layer_windows),
        layer_windows=layer_windows,
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        hidden_act="gelu_tanh",
        qk_norm=not is_gemma2,
        norm_offset=0.0,
        attention_scale=(common["hidden_size"] // common["num_heads"] if is_largest else head_dim) ** -0.5,
        attention_soft_cap=fields.number("attn_logit_softcapping", 50.0) if is_gemma2 else 0.0,
        logit_soft_cap=fields.number("final_logit_softcapping", 30.0 if is_gemma2 else 0.0),
    )


@dataclass(frozen=True)
class GemmaLayer:
    """Weights of one layer."""

    input_norm: RMSNorm
    attention: AttentionBlock
    post_attention_norm: RMSNorm
    pre_feedforward_norm: RMSNorm
    mlp: GatedMLP
    post_feedforward_norm: RMSNorm


@dataclass(frozen=True)
class GemmaModel:
    """Weights of a model. With tied embeddings ``embed`` and ``lm_head`` are one object.

    Attributes:
        embed_scale: what the rows of ``embed`` are multiplied by.
        logit_soft_cap: 0 for none.
    """

    embed: Matrix
    embed_scale: float
    layers: tuple[GemmaLayer, ...]
    norm: RMSNorm
    lm_head: Matrix
    logit_soft_cap: float


def forward(model: GemmaModel, ops: Ops, batch: Batch) -> Buffer:
    """The hidden state after the final norm of every token in the batch: ``[tokens, hidden_size]``."""
    hidden, residual = ops.scale(ops.embedding(batch, model.embed), model.embed_scale), None
    for layer in model.layers:
        x, residual = ops.rms_norm(hidden, layer.input_norm, residual)
        attended = attend(layer.attention, ops, batch, x)
        hidden, _ = ops.rms_norm(attended, layer.post_attention_norm)
        x, residual = ops.rms_norm(hidden, layer.pre_feedforward_norm, residual)
        hidden, _ = ops.rms_norm(feed_forward(layer.mlp, ops, x), layer.post_feedforward_norm)
    return ops.rms_norm(hidden, model.norm, residual)[0]


def logits(model: GemmaModel, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    scores = ops.linear(hidden, model.lm_head)
    return ops.soft_cap(scores, model.logit_soft_cap) if model.logit_soft_cap else scores


def load_weights(loader: WeightLoader, config: GemmaConfig) -> GemmaModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    embed = load_embedding(loader, config)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    return GemmaModel(
        embed=embed,
        embed_scale=config.hidden_size**0.5,
        layers=layers,
        norm=_load_norm(loader, config, "model.norm", config.hidden_size),
        lm_head=load_head(loader, config, embed),
        logit_soft_cap=config.logit_soft_cap,
    )


def _load_layer(loader: WeightLoader, config: GemmaConfig, index: int) -> GemmaLayer:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    q_norm = k_norm = None
    if config.qk_norm:
        q_norm = _load_norm(loader, config, f"{prefix}.self_attn.q_norm", config.head_dim)
        k_norm = _load_norm(loader, config, f"{prefix}.self_attn.k_norm", config.head_dim)
    attention = load_attention(
        loader,
        config,
        index,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        q_norm=q_norm,
        k_norm=k_norm,
    )
    return GemmaLayer(
        input_norm=_load_norm(loader, config, f"{prefix}.input_layernorm", hidden),
        attention=attention,
        post_attention_norm=_load_norm(loader, config, f"{prefix}.post_attention_layernorm", hidden),
        pre_feedforward_norm=_load_norm(loader, config, f"{prefix}.pre_feedforward_layernorm", hidden),
        mlp=load_mlp(loader, config, index),
        post_feedforward_norm=_load_norm(loader, config, f"{prefix}.post_feedforward_layernorm", hidden),
    )


def _load_norm(loader: WeightLoader, config: GemmaConfig, name: str, size: int) -> RMSNorm:
    return loader.rms_norm(name, size, config.rms_norm_eps, offset=config.norm_offset)
