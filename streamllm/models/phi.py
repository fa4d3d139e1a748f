"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's layout with fused projections, a rotation of part of each
head, and LongRoPE (arXiv:2402.13753) for the long contexts."""

from __future__ import annotations

from collections.abc import Mapping

from streamllm.models import gguf_config, hf_config
from streamllm.models.config_fields import ConfigFields
from streamllm.models.decoder import DecoderConfig, load_attention, load_embedding, load_head, load_mlp
from streamllm.models.gguf_config import GGUFFields
from streamllm.models.hf_config import ACTIVATIONS, Defaults
from streamllm.models.llama import LlamaLayer, LlamaModel, forward, logits
from streamllm.models.weights import WeightLoader

__all__ = ["GGUF_NAMES", "forward", "load_weights", "logits", "read_config", "read_gguf_config"]

GGUF_NAMES: Mapping[str, str] = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

_DEFAULTS = Defaults(4096, bos_token_id=1, eos_token_id=32000)


def read_config(fields: ConfigFields, architecture: str) -> DecoderConfig:
    common = hf_config.read_common(fields, architecture, _DEFAULTS)
    # The trained length stands beside the rotary parameters, and counts even where they have one.
    fields = ConfigFields(fields.path, {"original_max_position_embeddings": 4096, **fields.values})
    parameters = hf_config.rope_parameters(fields)
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):  # LongRoPE's older names
        parameters = {**parameters, "rope_type": "longrope"}
    rope = hf_config.rope_from_parameters(
        fields, parameters, common["head_dim"], common["max_position_embeddings"], may_be_partial=True
    )
    return DecoderConfig(
        **common,
        ropes=(rope,),
        layer_windows=(hf_config.read_window(fields, None),) * common["num_layers"],
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        hidden_act=fields.choice("hidden_act", "silu", ACTIVATIONS),
    )


def read_gguf_config(fields: GGUFFields, architecture: str) -> DecoderConfig:
    common = gguf_config.read_common(fields, architecture)
    window = int(fields.number("attention.sliding_window", 0))
    return DecoderConfig(
        **common,
        ropes=(gguf_config.read_rope(fields, common["head_dim"], common["max_position_embeddings"]),),
        layer_windows=(window or None,) * common["num_layers"],
        intermediate_size=fields.integer("feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
    )


def load_weights(loader: WeightLoader, config: DecoderConfig) -> LlamaModel:
    """Reads a model tensor by tensor; :func:`streamllm.models.llama.load_weights` for fused projections."""
    embed = load_embedding(loader, config)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    norm = loader.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps)
    return LlamaModel(embed, layers, norm, load_head(loader, config, embed))


def _load_layer(loader: WeightLoader, config: DecoderConfig, index: int) -> LlamaLayer:
    prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
    qkv = [(f"{prefix}.self_attn.qkv_proj", config.q_width + 2 * config.kv_width)]
    gate_up = [(f"{prefix}.mlp.gate_up_proj", 2 * config.intermediate_size)]
    return LlamaLayer(
        input_norm=loader.rms_norm(f"{prefix}.input_layernorm", hidden, eps),
        attention=load_attention(loader, config, index, qkv=qkv),
        post_attention_norm=loader.rms_norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        mlp=load_mlp(loader, config, index, gate_up=gate_up),
    )
