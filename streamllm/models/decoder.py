"""What the families have in common: attention with rotary embeddings, and the gated MLP.

Their modules are built of these; names of tensors are those of Hugging Face's checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamllm.models.model_config import ModelConfig
from streamllm.models.weights import WeightLoader
from streamllm.ops import Activation, Attention, Batch, Buffer, Gate, Matrix, Ops, RMSNorm, Vector

Parts = Sequence[tuple[str, int]]
"""Layers that are stacked row-wise into one matrix: name and rows of each."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """
    Attributes:
        intermediate_size: width of the gated MLP.
        rms_norm_eps: added to the mean square in every RMSNorm.
        qkv_bias: the query, key and value projections have biases.
        attention_out_bias: the attention's output projection has one.
        mlp_bias: the MLP's three projections have them.
        hidden_act: of the MLP's gate.
        layer_ropes: for each layer which of ``ropes`` turns its queries and keys, ``None`` for none of them;
            absent where all layers have the first.
    """

    intermediate_size: int
    rms_norm_eps: float
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Activation = "silu"
    layer_ropes: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class AttentionBlock:
    """Weights of a layer's attention; q, k and v are one matrix."""

    qkv: Matrix
    attention: Attention
    out: Matrix


@dataclass(frozen=True)
class GatedMLP:
    """Weights of a layer's MLP; gate and up are one matrix."""

    gate_up: Matrix
    gate: Gate
    down: Matrix


def attend(block: AttentionBlock, ops: Ops, batch: Batch, x: Buffer) -> Buffer:
    """The attention's output for rows ``[tokens, hidden_size]``, projected back to their width."""
    q = ops.rotary_and_cache(ops.linear(x, block.qkv), batch, block.attention)
    return ops.linear(ops.paged_attention(q, batch, block.attention), block.out)


def feed_forward(mlp: GatedMLP, ops: Ops, x: Buffer) -> Buffer:
    """The MLP's output for rows ``[tokens, hidden_size]``, as wide as they are."""
    return ops.linear(ops.gate_and_mul(ops.linear(x, mlp.gate_up), mlp.gate), mlp.down)


def load_embedding(loader: WeightLoader, config: ModelConfig) -> Matrix:
    return loader.linear([("model.embed_tokens", config.vocab_size)], config.hidden_size)


def load_head(loader: WeightLoader, config: ModelConfig, embed: Matrix) -> Matrix:
    """The matrix of the logits: ``embed`` itself where both are tied."""
    if config.tie_word_embeddings:
        return embed
    return loader.linear([("lm_head", config.vocab_size)], config.hidden_size)


def load_head_norms(loader: WeightLoader, config: DecoderConfig, index: int) -> tuple[RMSNorm, RMSNorm]:
    """A layer's norms over each head of the queries and of the keys."""
    name, size, eps = f"model.layers.{index}.self_attn", config.head_dim, config.rms_norm_eps
    return loader.rms_norm(f"{name}.q_norm", size, eps), loader.rms_norm(f"{name}.k_norm", size, eps)


def load_attention(
    loader: WeightLoader,
    config: DecoderConfig,
    index: int,
    *,
    qkv: Parts | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    sinks: Vector | None = None,
) -> AttentionBlock:
    """A layer's attention.

    Args:
        qkv: the layers that make queries, keys and values; ``None``: ``q_proj``, ``k_proj``, ``v_proj``.
        scale: of the scores; ``None``: that of the heads' width.
    """
    group, place = config.kv_layout.places[index]
    rope = 0 if config.layer_ropes is None else config.layer_ropes[index]
    name = f"model.layers.{index}.self_attn"
    parts = qkv or [
        (f"{name}.q_proj", config.q_width),
        (f"{name}.k_proj", config.kv_width),
        (f"{name}.v_proj", config.kv_width),
    ]
    attention = Attention(
        group=group,
        place=place,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rotary_dim=0 if rope is None else config.ropes[rope].rotary_dim,
        scale=config.head_dim**-0.5 if scale is None else scale,
        window=config.layer_windows[index] or 0,
        rope=rope or 0,
        soft_cap=soft_cap,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=sinks,
    )
    return AttentionBlock(
        qkv=loader.linear(parts, config.hidden_size, bias=config.qkv_bias),
        attention=attention,
        out=loader.linear(
            [(f"{name}.o_proj", config.hidden_size)], config.q_width, bias=config.attention_out_bias
        ),
    )


def load_mlp(
    loader: WeightLoader,
    config: DecoderConfig,
    index: int,
    *,
    gate_up: Parts | None = None,
    name: str = "mlp",
    inner: int | None = None,
) -> GatedMLP:
    """A layer's MLP.

    Args:
        name: of the MLP in its layer.
        inner: its width; ``None``: ``intermediate_size``.
        gate_up: the layers that make the gates and what they let through; ``None``: ``gate_proj``,
            ``up_proj``.
    """
    hidden, inner = config.hidden_size, inner or config.intermediate_size
    name = f"model.layers.{index}.{name}"
    parts = gate_up or [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)]
    return GatedMLP(
        gate_up=loader.linear(parts, hidden, bias=config.mlp_bias),
        gate=Gate(config.hidden_act),
        down=loader.linear([(f"{name}.down_proj", hidden)], inner, bias=config.mlp_bias),
    )
