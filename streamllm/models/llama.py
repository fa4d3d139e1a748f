"""Llama and the families that share its layout: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2.

What tells them apart are fields of the config: biases on q, k and v (Qwen2), norms over each head of q and k
(Qwen3), a window (Mistral), tied embeddings. Names of tensors are those of Hugging Face's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamllm.models.kv_layout import kv_layout
from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import WeightLoader
from streamllm.ops import Attention, Batch, Buffer, Matrix, Ops, RMSNorm


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer; q, k and v are one matrix, and so are gate and up."""

    input_norm: RMSNorm
    qkv: Matrix
    attention: Attention
    attention_out: Matrix
    post_attention_norm: RMSNorm
    gate_up: Matrix
    down: Matrix


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
        q = ops.rotary_and_cache(ops.linear(x, layer.qkv), batch, layer.attention)
        hidden = ops.linear(ops.paged_attention(q, batch, layer.attention), layer.attention_out)
        x, residual = ops.rms_norm(hidden, layer.post_attention_norm, residual)
        hidden = ops.linear(ops.silu_and_mul(ops.linear(x, layer.gate_up)), layer.down)
    return ops.rms_norm(hidden, model.norm, residual)[0]


def logits(model: LlamaModel, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    return ops.linear(hidden, model.lm_head)


def load_weights(loader: WeightLoader, config: ModelConfig) -> LlamaModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor.

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    embed = loader.linear([("model.embed_tokens", vocab)], hidden)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    norm = loader.norm("model.norm", hidden, config.rms_norm_eps)
    lm_head = embed if config.tie_word_embeddings else loader.linear([("lm_head", vocab)], hidden)
    return LlamaModel(embed, layers, norm, lm_head)


def _load_layer(loader: WeightLoader, config: ModelConfig, index: int) -> LlamaLayer:
    prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    group, place = kv_layout(config.layer_windows).places[index]
    self_attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LlamaLayer(
        input_norm=loader.norm(f"{prefix}.input_layernorm", hidden, eps),
        qkv=loader.linear(
            [
                (f"{self_attn}.q_proj", q_width),
                (f"{self_attn}.k_proj", kv_width),
                (f"{self_attn}.v_proj", kv_width),
            ],
            hidden,
            bias=config.qkv_bias,
        ),
        attention=Attention(
            group=group,
            place=place,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.rotary_dim,
            scale=config.head_dim**-0.5,
            window=config.layer_windows[index] or 0,
            q_norm=loader.norm(f"{self_attn}.q_norm", config.head_dim, eps) if config.qk_norm else None,
            k_norm=loader.norm(f"{self_attn}.k_norm", config.head_dim, eps) if config.qk_norm else None,
        ),
        attention_out=loader.linear(
            [(f"{self_attn}.o_proj", hidden)], q_width, bias=config.attention_out_bias
        ),
        post_attention_norm=loader.norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        gate_up=loader.linear(
            [(f"{mlp}.gate_proj", config.intermediate_size), (f"{mlp}.up_proj", config.intermediate_size)],
            hidden,
            bias=config.mlp_bias,
        ),
        down=loader.linear([(f"{mlp}.down_proj", hidden)], config.intermediate_size, bias=config.mlp_bias),
    )
