"""The tiny models as GGUF files, written as llama.cpp's ``convert_hf_to_gguf.py`` does."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers.gguf_tensors import (
    Tensors,
    as_they_are,
    expert_tensors,
    gpt2_tensors,
    gpt_oss_tensors,
    joined_expert_tensors,
)
from helpers.tiny_models import new_tiny_model, save_tokenizer

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT2_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_GPT_OSS_NAMES = {
    **_EXPERT_NAMES,
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
}
_MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


@dataclass(frozen=True)
class GGUFFamily:
    """
    Attributes:
        architecture: llama.cpp's name.
        names: of a layer's tensors, where they are others than Llama's.
        permuted: the rows of the query and key projections are.
        norm_offset: added to the factors of norms.
        metadata: writes what only this family has.
        tensors: what the converter makes of a tensor before it names it.
    """

    architecture: str
    names: dict[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    metadata: Callable[[Any, Any], None] = lambda writer, config: None
    tensors: Callable[[str, np.ndarray], Tensors] = as_they_are


def _write_window(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def _write_gemma2(writer: Any, config: Any) -> None:
    _write_window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _write_pattern(writer: Any, config: Any) -> None:
    _write_window(writer, config)
    writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config.layer_types])


def _write_granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _write_ministral3(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def _write_experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _write_qwen_experts(writer: Any, config: Any) -> None:
    _write_experts(writer, config)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_gpt_oss(writer: Any, config: Any) -> None:
    _write_experts(writer, config)
    _write_window(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)


GGUF_FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily("llama", permuted=True),
    "mistral": GGUFFamily("llama", permuted=True),
    "ministral3": GGUFFamily("mistral3", permuted=True, metadata=_write_ministral3),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3"),
    "smollm3": GGUFFamily("smollm3", permuted=True),
    "phi3": GGUFFamily(
        "phi3",
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        metadata=_write_window,
    ),
    "gemma2": GGUFFamily("gemma2", _GEMMA_NAMES, norm_offset=1.0, metadata=_write_gemma2),
    "gemma3": GGUFFamily("gemma3", _GEMMA_NAMES, norm_offset=1.0, metadata=_write_pattern),
    "olmo2": GGUFFamily("olmo2", _GEMMA_NAMES),
    "olmo3": GGUFFamily("olmo2", _GEMMA_NAMES, metadata=_write_pattern),
    "granite": GGUFFamily("granite", permuted=True, metadata=_write_granite),
    "gpt2": GGUFFamily("gpt2", _GPT2_NAMES, tensors=gpt2_tensors),
    "mixtral": GGUFFamily(
        "llama", _EXPERT_NAMES, permuted=True, metadata=_write_experts, tensors=expert_tensors
    ),
    "qwen2moe": GGUFFamily("qwen2moe", _EXPERT_NAMES, metadata=_write_qwen_experts, tensors=expert_tensors),
    "qwen3moe": GGUFFamily("qwen3moe", _EXPERT_NAMES, metadata=_write_qwen_experts, tensors=expert_tensors),
    "gpt-oss": GGUFFamily("gpt-oss", _GPT_OSS_NAMES, metadata=_write_gpt_oss, tensors=gpt_oss_tensors),
}


def save_tiny_gguf(
    path: Path,
    family: str = "llama",
    *,
    tied: bool = False,
    quantization: str = "F32",
    joined_experts: bool = False,
    extra_metadata: dict[str, Any] | None = None,
    **config_fields: Any,
) -> Any:
    """Writes a tiny model to ``path`` and returns it (a transformers model with the unquantised weights).

    Args:
        quantization: GGML's name of the matrices' type, such as ``"F16"``, ``"Q8_0"``, ``"Q4_1"``. Types that
            the gguf package only reads (``"Q4_K"``) get other weights than the model's, as large as those.
        joined_experts: gates and ups of experts are one tensor.
        extra_metadata: floats and strings under the architecture's prefix, as ``{"rope.freq_base": 1e6}``.
    """
    import gguf
    import torch

    torch.manual_seed(0)
    model = new_tiny_model(family, tied=tied, **config_fields)
    kind = GGUF_FAMILIES[family]
    if joined_experts:
        kind = replace(kind, tensors=joined_expert_tensors)
    writer = gguf.GGUFWriter(path, kind.architecture)
    if family == "gpt2":
        _write_gpt2_metadata(writer, model.config)
    else:
        _write_metadata(writer, model.config)
        _write_rope(writer, model.config)
    kind.metadata(writer, model.config)
    for name, value in (extra_metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{kind.architecture}.{name}", value)
    _write_tokenizer(writer, path.parent)
    for name, values in _tensors(model, kind, tied):
        is_matrix = values.ndim > 1 and name.endswith("weight")
        chosen = gguf.GGMLQuantizationType[quantization if is_matrix else "F32"]
        writer.add_tensor(name, _stored(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _stored(values: np.ndarray, chosen: Any) -> np.ndarray:
    """A tensor in one of GGML's types."""
    import gguf

    try:
        return gguf.quants.quantize(values, chosen)
    except NotImplementedError:
        from helpers.quantized_weights import dequantized, stored_groups

    rows, columns = math.prod(values.shape[:-1]), values.shape[-1]
    kind, scale, seed = chosen.name.lower(), 0.05, int(np.abs(values).sum())
    trial = dequantized(stored_groups(kind, rows, columns, np.random.default_rng(seed), scale))
    scale *= values.std() / trial.std()
    stored = stored_groups(kind, rows, columns, np.random.default_rng(seed), scale).data
    return stored.reshape(*values.shape[:-1], -1)


def _write_metadata(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def _write_gpt2_metadata(writer: Any, config: Any) -> None:
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _write_rope(writer: Any, config: Any) -> None:
    """As ``TextModel.set_gguf_parameters`` does, and for Phi-3 its own."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(head_dim * parameters.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(parameters["rope_theta"])
    if sliding := config.rope_parameters.get("sliding_attention"):
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
    rope_type = parameters["rope_type"]
    if rope_type in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", rope_type)
        writer.add_rope_scaling_factor(parameters["factor"])
    if rope_type in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if rope_type == "longrope":
        for length in ("long", "short"):
            factors = np.array(parameters[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        scale = config.max_position_embeddings / parameters["original_max_position_embeddings"]
        trained = parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(trained)))


def _write_tokenizer(writer: Any, folder: Path) -> None:
    save_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)


def _tensors(model: Any, kind: GGUFFamily, tied: bool) -> list[tuple[str, np.ndarray]]:
    num_heads = model.config.num_attention_heads
    heads = {"q_proj": num_heads, "k_proj": getattr(model.config, "num_key_value_heads", num_heads)}
    names = {**_LAYER_NAMES, **kind.names}
    converted = itertools.chain.from_iterable(
        kind.tensors(name, parameter.numpy()) for name, parameter in model.state_dict().items()
    )
    tensors = []
    for name, values in converted:
        stem, suffix = name.rsplit(".", 1)
        if tied and stem == "lm_head":
            continue
        part = stem.rsplit(".", 1)[-1]
        if kind.permuted and part in heads:
            values = _permute(values, heads[part])
        if part.endswith("norm"):
            values = values + np.float32(kind.norm_offset)
        if stem in _MODEL_NAMES:
            gguf_stem = _MODEL_NAMES[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            gguf_stem = f"blk.{layer}.{names[rest]}"
        tensors.append((f"{gguf_stem}.{suffix}", np.ascontiguousarray(values)))
    return tensors


def _permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's converter."""
    shaped = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return shaped.swapaxes(1, 2).reshape(values.shape)
