"""Llama's layout with experts in the place of MLPs: Mixtral, Qwen2-MoE, Qwen3-MoE.

What tells them apart are fields of the config: an MLP that every row passes besides its experts, let through
by a gate (Qwen2-MoE), layers that keep a plain MLP (both Qwens), norms over each head of q and k (Qwen3-MoE).

The experts of a layer are tensors of their own, three an expert, in the files that models are published in;
Transformers 5 and llama.cpp stack them, each in its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamllm.models import gguf_config, hf_config
from streamllm.models.checkpoint import Checkpoint
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
from streamllm.models.stored_layout import Sources, StoredLayout
from streamllm.models.tensor_source import TensorPart
from streamllm.models.weights import WeightLoader
from streamllm.ops import Batch, Buffer, Experts, Gate, Matrix, Ops, RMSNorm

GGUF_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_ALIASES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
_MIXTRAL, _QWEN2, _QWEN3 = "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class _Traits:
    """What a config.json of an architecture leaves out."""

    defaults: Defaults
    eps: float
    theta: float
    num_experts: int
    top_k: int
    expert_size: int | None


_TRAITS = {
    _MIXTRAL: _Traits(
        Defaults(131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2), 1e-5, 1e6, 8, 2, None
    ),
    _QWEN2: _Traits(Defaults(32768, num_kv_heads=16), 1e-6, 10000.0, 60, 4, 1408),
    _QWEN3: _Traits(Defaults(32768, num_kv_heads=4), 1e-6, 10000.0, 128, 8, 768),
}


@dataclass(frozen=True, kw_only=True)
class MoeConfig(DecoderConfig):
    """
    Attributes:
        qk_norm: queries and keys pass an RMSNorm over each head before the rotation.
        sparse_layers: for each layer whether it has experts; in those that do not ``intermediate_size`` is
            the MLP's width.
        expert_size: width of an expert's MLP.
        num_experts, top_k, normalize: as in :class:`streamllm.ops.Experts`.
        shared_size: width of the MLP that every row passes besides its experts; 0 for none.
    """

    qk_norm: bool
    sparse_layers: tuple[bool, ...]
    expert_size: int
    num_experts: int
    top_k: int
    normalize: bool
    shared_size: int = 0


def read_config(fields: ConfigFields, architecture: str) -> MoeConfig:
    fields = fields.with_aliases(_ALIASES)
    traits = _TRAITS[architecture]
    common = hf_config.read_common(fields, architecture, traits.defaults)
    is_mixtral, is_qwen2, is_qwen3 = (architecture == name for name in (_MIXTRAL, _QWEN2, _QWEN3))
    inner = fields.integer("intermediate_size")
    attention_bias = is_qwen3 and fields.flag("attention_bias")
    rope = hf_config.read_rope(
        fields, common["head_dim"], common["max_position_embeddings"], default_theta=traits.theta
    )
    expert_size = inner if is_mixtral else fields.integer("moe_intermediate_size", traits.expert_size)
    return MoeConfig(
        **common,
        ropes=(rope,),
        layer_windows=_layer_windows(fields, architecture, common["num_layers"]),
        intermediate_size=inner,
        rms_norm_eps=fields.number("rms_norm_eps", traits.eps),
        qkv_bias=attention_bias or (is_qwen2 and fields.flag("qkv_bias", True)),
        attention_out_bias=attention_bias,
        hidden_act=fields.choice("hidden_act", "silu", ACTIVATIONS),
        qk_norm=is_qwen3,
        sparse_layers=(True,) * common["num_layers"]
        if is_mixtral
        else _sparse_layers(fields, common["num_layers"]),
        expert_size=expert_size,
        num_experts=fields.integer("num_experts", traits.num_experts),
        top_k=read_top_k(fields, traits.top_k, traits.num_experts),
        normalize=is_mixtral or fields.flag("norm_topk_prob"),
        shared_size=fields.integer("shared_expert_intermediate_size", 5632) if is_qwen2 else 0,
    )


def read_top_k(fields: ConfigFields, default: int, default_num_experts: int) -> int:
    """``num_experts_per_tok``; there must be as many experts."""
    top_k: int = fields.integer("num_experts_per_tok", default)
    if top_k > fields.integer("num_experts", default_num_experts):
        raise fields.wrong("num_experts_per_tok", f"at most {fields.name_of('num_experts')}")
    return top_k


def _layer_windows(fields: ConfigFields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == _MIXTRAL:
        return (hf_config.read_window(fields, None),) * num_layers
    if not fields.flag("use_sliding_window"):
        return (None,) * num_layers
    window = hf_config.read_window(fields, 4096)
    if architecture == _QWEN3:
        return (window,) * num_layers
    listed = hf_config.read_layer_windows(fields, window, num_layers)
    if listed is not None:
        return listed
    last = fields.integer("max_window_layers", 28)
    return tuple(window if layer < last and layer % 2 == 0 else None for layer in range(num_layers))


def _sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every ``decoder_sparse_step``-th layer but those in ``mlp_only_layers``."""
    step, plain = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in plain):
        raise fields.wrong("mlp_only_layers", "a list of layers' numbers")
    return tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))


def read_gguf_config(fields: GGUFFields, architecture: str) -> MoeConfig:
    common: dict[str, Any] = gguf_config.read_common(fields, architecture)
    num_layers = common["num_layers"]
    sparse = tuple(fields.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(num_layers))
    first = f"blk.{sparse.index(True) if any(sparse) else 0}"
    expert_size = fields.dimension(f"{first}.ffn_down_exps.weight", 2)
    has_shared = fields.has_tensor(f"{first}.ffn_gate_shexp.weight")
    window = fields.number("attention.sliding_window", 0)
    normalize = fields.get("expert_weights_norm")
    return MoeConfig(
        **common,
        ropes=(gguf_config.read_rope(fields, common["head_dim"], common["max_position_embeddings"]),),
        layer_windows=(int(window) or None,) * num_layers,
        intermediate_size=fields.integer("feed_forward_length", expert_size),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        qkv_bias=fields.has_tensor("blk.0.attn_q.bias"),
        attention_out_bias=fields.has_tensor("blk.0.attn_output.bias"),
        qk_norm=fields.has_tensor("blk.0.attn_q_norm.weight"),
        sparse_layers=sparse,
        expert_size=expert_size,
        num_experts=fields.integer("expert_count"),
        top_k=fields.integer("expert_used_count"),
        # Where the metadata do not say, llama.cpp takes what the architecture's models were trained with.
        normalize=architecture != _QWEN2 if normalize is None else bool(normalize),
        shared_size=fields.dimension(f"{first}.ffn_gate_shexp.weight", 0) if has_shared else 0,
    )


def _expert(config: MoeConfig, index: int, expert: int) -> tuple[str, str, str]:
    """What an expert's gate, up and down projections are called."""
    if config.architecture == _MIXTRAL:
        prefix = f"model.layers.{index}.block_sparse_moe.experts.{expert}"
        return f"{prefix}.w1", f"{prefix}.w3", f"{prefix}.w2"
    prefix = f"model.layers.{index}.mlp.experts.{expert}"
    return f"{prefix}.gate_proj", f"{prefix}.up_proj", f"{prefix}.down_proj"


def _router(config: MoeConfig, index: int) -> str:
    block = "block_sparse_moe" if config.architecture == _MIXTRAL else "mlp"
    return f"model.layers.{index}.{block}.gate"


def _sources(config: MoeConfig, checkpoint: Checkpoint) -> Sources:
    sources: Sources = {}
    for index, is_sparse in enumerate(config.sparse_layers):
        if is_sparse:
            sources.update(_layer_sources(config, checkpoint, index))
    return sources


def _layer_sources(config: MoeConfig, checkpoint: Checkpoint, index: int) -> Sources:
    """The tensors of a layer whose experts are stacked; none where they are not."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    block = f"model.layers.{index}.mlp"
    sources: Sources = {}
    for kind in ("", ".weight"):
        gate_up = f"{block}.experts.gate_up_proj{kind}"
        halves = [f"{block}.experts.gate_proj{kind}", f"{block}.experts.up_proj{kind}"]
        if not any(map(checkpoint.has, [gate_up, *halves])):
            continue
        is_joined = checkpoint.has(gate_up)
        for expert in range(count):
            *gate_and_up, down = _expert(config, index, expert)
            for half, name in enumerate(gate_and_up):
                sources[f"{name}.weight"] = (
                    TensorPart(
                        gate_up,
                        (count, 2 * inner, hidden),
                        entry=expert,
                        rows=slice(half * inner, (half + 1) * inner),
                    )
                    if is_joined
                    else TensorPart(halves[half], (count, inner, hidden), entry=expert)
                )
            sources[f"{down}.weight"] = TensorPart(
                f"{block}.experts.down_proj{kind}", (count, hidden, inner), entry=expert
            )
    shared_gate = f"{block}.shared_expert_gate.weight"
    if checkpoint.has(shared_gate) and len(checkpoint.shape(shared_gate)) == 1:
        sources[shared_gate] = TensorPart(shared_gate, (hidden,), is_row=True)
    if sources:
        sources[f"{_router(config, index)}.weight"] = TensorPart(f"{block}.gate.weight", (count, hidden))
    return sources


STORED = StoredLayout(sources=_sources)


@dataclass(frozen=True)
class SparseMLP:
    """Weights of a layer's experts, and of the MLP (if any) that every row passes besides.

    Attributes:
        shared_gate: ``[1, hidden_size]``: how much of the shared MLP's output is let through.
    """

    router: Matrix
    experts: Experts
    shared: GatedMLP | None = None
    shared_gate: Matrix | None = None


@dataclass(frozen=True)
class MoeLayer:
    """Weights of one layer."""

    input_norm: RMSNorm
    attention: AttentionBlock
    post_attention_norm: RMSNorm
    mlp: SparseMLP | GatedMLP


@dataclass(frozen=True)
class MoeModel:
    """Weights of a model. With tied embeddings ``embed`` and ``lm_head`` are one object."""

    embed: Matrix
    layers: tuple[MoeLayer, ...]
    norm: RMSNorm
    lm_head: Matrix


def forward(model: MoeModel, ops: Ops, batch: Batch) -> Buffer:
    """The hidden state after the final norm of every token: ``[tokens, hidden_size]``."""
    hidden, residual = ops.embedding(batch, model.embed), None
    for layer in model.layers:
        x, residual = ops.rms_norm(hidden, layer.input_norm, residual)
        hidden = attend(layer.attention, ops, batch, x)
        x, residual = ops.rms_norm(hidden, layer.post_attention_norm, residual)
        if isinstance(layer.mlp, SparseMLP):
            hidden = _sparse_feed_forward(layer.mlp, ops, x)
        else:
            hidden = feed_forward(layer.mlp, ops, x)
    return ops.rms_norm(hidden, model.norm, residual)[0]


def _sparse_feed_forward(mlp: SparseMLP, ops: Ops, x: Buffer) -> Buffer:
    hidden = ops.experts(x, ops.linear(x, mlp.router), mlp.experts)
    if mlp.shared is None:
        return hidden
    shared = ops.sigmoid_scale(feed_forward(mlp.shared, ops, x), ops.linear(x, mlp.shared_gate))
    return ops.add(shared, hidden)


def logits(model: MoeModel, ops: Ops, hidden: Buffer) -> Buffer:
    """Scores of the next token from hidden states ``[rows, hidden_size]``: ``[rows, vocab_size]``."""
    return ops.linear(hidden, model.lm_head)


def load_weights(loader: WeightLoader, config: MoeConfig) -> MoeModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor (of the experts, at
    one expert's).

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    embed = load_embedding(loader, config)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    norm = loader.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps)
    return MoeModel(embed, layers, norm, load_head(loader, config, embed))


def _load_layer(loader: WeightLoader, config: MoeConfig, index: int) -> MoeLayer:
    prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
    q_norm, k_norm = load_head_norms(loader, config, index) if config.qk_norm else (None, None)
    return MoeLayer(
        input_norm=loader.rms_norm(f"{prefix}.input_layernorm", hidden, eps),
        attention=load_attention(loader, config, index, q_norm=q_norm, k_norm=k_norm),
        post_attention_norm=loader.rms_norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        mlp=_load_sparse_mlp(loader, config, index)
        if config.sparse_layers[index]
        else load_mlp(loader, config, index),
    )


def _load_sparse_mlp(loader: WeightLoader, config: MoeConfig, index: int) -> SparseMLP:
    hidden, inner = config.hidden_size, config.expert_size
    names = [_expert(config, index, expert) for expert in range(config.num_experts)]
    shared = shared_gate = None
    if config.shared_size:
        shared = load_mlp(loader, config, index, name="mlp.shared_expert", inner=config.shared_size)
        shared_gate = loader.linear([(f"model.layers.{index}.mlp.shared_expert_gate", 1)], hidden)
    return SparseMLP(
        router=loader.linear([(_router(config, index), config.num_experts)], hidden),
        experts=Experts(
            gate_up=loader.experts([[(gate, inner), (up, inner)] for gate, up, _ in names], hidden),
            down=loader.experts([[(down, hidden)] for _, _, down in names], inner),
            num_experts=config.num_experts,
            top_k=config.top_k,
            normalize=config.normalize,
            gate=Gate(config.hidden_act),
        ),
        shared=shared,
        shared_gate=shared_gate,
    )
