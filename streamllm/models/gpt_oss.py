"""gpt-oss (OpenAI 2025): experts in every layer, a learned sink in each head's softmax, windows in every
other layer, YaRN.

A layer's experts are stacked in all its files, gate and up rows taking turns, as ``[inputs, outputs]`` in 16
bits or as MXFP4 blocks; llama.cpp's converter has put gate and up asunder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamllm.models import gguf_config, hf_config, moe
from streamllm.models.checkpoint import Checkpoint
from streamllm.models.config_fields import ConfigFields
from streamllm.models.decoder import DecoderConfig, load_attention, load_embedding, load_head
from streamllm.models.gguf_config import GGUFFields
from streamllm.models.hf_config import Defaults
from streamllm.models.moe import MoeLayer, MoeModel, SparseMLP
from streamllm.models.mxfp4 import MXFP4Part
from streamllm.models.stored_layout import Sources, StoredLayout
from streamllm.models.tensor_source import TensorPart, TensorSource
from streamllm.models.weights import WeightLoader
from streamllm.ops import Experts, Gate

GGUF_NAMES: Mapping[str, str] = {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_ALIASES = {"num_experts": "num_local_experts"}
_DEFAULTS = Defaults(131072, num_kv_heads=8, head_dim=64)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes for an absent ``rope_parameters``."""
_THETA = 150000.0
_ALPHA, _LIMIT = 1.702, 7.0

forward = moe.forward
logits = moe.logits


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """
    Attributes:
        num_experts, top_k: as in :class:`streamllm.ops.Experts`; ``intermediate_size`` is an expert's width.
        limit: as in :class:`streamllm.ops.Gate`.
    """

    num_experts: int
    top_k: int
    limit: float


def read_config(fields: ConfigFields, architecture: str) -> GptOssConfig:
    fields = fields.with_aliases(_ALIASES)
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields = ConfigFields(fields.path, {**fields.values, "rope_parameters": _ROPE}, _ALIASES)
    if fields.number("swiglu_alpha", _ALPHA) != _ALPHA:
        raise fields.wrong("swiglu_alpha", f"{_ALPHA}")
    common = hf_config.read_common(fields, architecture, _DEFAULTS)
    num_layers = common["num_layers"]
    window = hf_config.read_window(fields, 128)
    listed = hf_config.read_layer_windows(fields, window, num_layers)
    bias = fields.flag("attention_bias", True)
    rope = hf_config.read_rope(
        fields, common["head_dim"], common["max_position_embeddings"], default_theta=_THETA
    )
    return GptOssConfig(
        **common,
        ropes=(rope,),
        layer_windows=_alternating(window, num_layers) if listed is None else listed,
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        attention_out_bias=bias,
        num_experts=fields.integer("num_experts", 128),
        top_k=moe.read_top_k(fields, 4, 128),
        limit=fields.number("swiglu_limit", _LIMIT),
    )


def _alternating(window: int | None, num_layers: int) -> tuple[int | None, ...]:
    return tuple(None if layer % 2 else window for layer in range(num_layers))


def read_gguf_config(fields: GGUFFields, architecture: str) -> GptOssConfig:
    common: dict[str, Any] = gguf_config.read_common(fields, architecture)
    rope = gguf_config.read_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return GptOssConfig(
        **common,
        # The metadata cannot say that YaRN's range of dimensions is not rounded, which all models of this
        # architecture were trained with.
        ropes=(replace(rope, truncate=False),),
        layer_windows=_alternating(fields.integer("attention.sliding_window"), common["num_layers"]),
        intermediate_size=fields.integer("expert_feed_forward_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        qkv_bias=fields.has_tensor("blk.0.attn_q.bias"),
        attention_out_bias=fields.has_tensor("blk.0.attn_output.bias"),
        num_experts=fields.integer("expert_count"),
        top_k=fields.integer("expert_used_count"),
        limit=_LIMIT,
    )


def _sources(config: GptOssConfig, checkpoint: Checkpoint) -> Sources:
    sources: Sources = {}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        sinks, experts = f"{layer}.self_attn.sinks", f"{layer}.mlp.experts"
        if checkpoint.has(f"{sinks}.weight"):
            sources[sinks] = TensorPart(f"{sinks}.weight", (config.num_heads,))
        is_split = checkpoint.has(f"{experts}.gate_proj.weight")
        for expert in range(config.num_experts):
            name = f"{experts}.{expert}"
            if is_split:
                sources.update(_split_expert(config, experts, expert))
                continue
            for half, rows in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))):
                weight, bias = _joined_rows(config, checkpoint, f"{experts}.gate_up_proj", expert, rows)
                sources[f"{name}.{half}.weight"], sources[f"{name}.{half}.bias"] = weight, bias
            weight, bias = _joined_rows(config, checkpoint, f"{experts}.down_proj", expert, slice(None))
            sources[f"{name}.down_proj.weight"], sources[f"{name}.down_proj.bias"] = weight, bias
    return sources


def _joined_rows(
    config: GptOssConfig, checkpoint: Checkpoint, stack: str, expert: int, rows: slice
) -> tuple[TensorSource, TensorSource]:
    """Rows of an expert's weight, and the elements of its bias, in a folder's stacks."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    outputs, inputs = (hidden, inner) if stack.endswith("down_proj") else (2 * inner, hidden)
    bias = TensorPart(f"{stack}_bias", (count, outputs), entry=expert, rows=rows)
    if checkpoint.has(f"{stack}_blocks"):
        return MXFP4Part(stack, (count, outputs, inputs), expert, rows), bias
    return TensorPart(stack, (count, inputs, outputs), entry=expert, transposed=True, rows=rows), bias


def _split_expert(config: GptOssConfig, experts: str, expert: int) -> Sources:
    """An expert's tensors in a GGUF's stacks."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    sources: Sources = {}
    for part, shape in (
        ("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner)),
    ):  # fmt: skip
        name, stack = f"{experts}.{expert}.{part}", f"{experts}.{part}"
        sources[f"{name}.weight"] = TensorPart(f"{stack}.weight", (count, *shape), entry=expert)
        sources[f"{name}.bias"] = TensorPart(f"{stack}.bias", (count, shape[0]), entry=expert)
    return sources


STORED = StoredLayout(quant_methods=frozenset({"mxfp4"}), sources=_sources)


def load_weights(loader: WeightLoader, config: GptOssConfig) -> MoeModel:
    """Reads a model tensor by tensor, so that memory peaks at the model and one tensor (of the experts, at
    one expert's).

    Raises:
        ModelLoadError: a tensor is missing or has another shape than the config says.
    """
    embed = load_embedding(loader, config)
    layers = tuple(_load_layer(loader, config, index) for index in range(config.num_layers))
    norm = loader.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps)
    return MoeModel(embed, layers, norm, load_head(loader, config, embed))


def _load_layer(loader: WeightLoader, config: GptOssConfig, index: int) -> MoeLayer:
    prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
    sinks = loader.vector(f"{prefix}.self_attn.sinks", config.num_heads)
    return MoeLayer(
        input_norm=loader.rms_norm(f"{prefix}.input_layernorm", hidden, eps),
        attention=load_attention(loader, config, index, sinks=sinks),
        post_attention_norm=loader.rms_norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        mlp=_load_experts(loader, config, f"{prefix}.mlp"),
    )


def _load_experts(loader: WeightLoader, config: GptOssConfig, prefix: str) -> SparseMLP:
    count, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    names = [f"{prefix}.experts.{expert}" for expert in range(count)]
    gate_up = [[(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)] for name in names]
    down = [[(f"{name}.down_proj", hidden)] for name in names]
    return SparseMLP(
        router=loader.linear([(f"{prefix}.router", count)], hidden, bias=True),
        experts=Experts(
            gate_up=loader.experts(gate_up, hidden, bias=True),
            down=loader.experts(down, inner, bias=True),
            num_experts=count,
            top_k=config.top_k,
            normalize=True,
            gate=Gate(limit=config.limit),
        ),
    )
