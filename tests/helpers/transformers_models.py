"""Tiny random models of architectures that streamllm has no description of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.tiny_models import VOCAB_SIZE, save_tokenizer

WINDOW = 24
"""Positions that layers with a window see."""

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_GPT_SIZES = {"vocab_size": VOCAB_SIZE, "n_positions": 1024, "n_embd": 64, "n_layer": 2, "n_head": 4}
_TWO_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Tiny:
    """An architecture, and what is special about it that the fields show."""

    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: _SIZES)


OTHERS: dict[str, Tiny] = {
    "gpt-neox": Tiny("gpt_neox", {"rotary_pct": 0.25}),
    "gptj": Tiny("gptj", {"rotary_dim": 8}, _GPT_SIZES),
    "gpt-bigcode": Tiny("gpt_bigcode", {"multi_query": True}, _GPT_SIZES),
    "stablelm": Tiny("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "phi": Tiny("phi", {"qk_layernorm": True}),
    "starcoder2": Tiny("starcoder2", {"sliding_window": WINDOW}),
    "cohere": Tiny("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    # Windows with rotary embeddings, full attention without; scaled logits.
    "cohere2": Tiny("cohere2", {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": _TWO_WINDOWS}),
    "olmo": Tiny("olmo", {"clip_qkv": 1.0}),
    "glm4": Tiny("glm4", {"head_dim": 16}),
    "nemotron": Tiny("nemotron", {"head_dim": 16}),
    "exaone4": Tiny("exaone4", {"sliding_window": WINDOW, "layer_types": _TWO_WINDOWS}),
    "helium": Tiny("helium", {"head_dim": 16}),
    # Soft caps of scores and of logits.
    "vaultgemma": Tiny(
        "vaultgemma",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 12,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    # Sinks; heads of 12, which are widened to 16 in the cache.
    "granite-swa": Tiny("granite_swa", {"hidden_size": 48, "sliding_window": WINDOW}),
    # Keys of 20 and values of 12, and experts.
    "deepseek-v3": Tiny(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 12,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
}
CHEAP = ["cohere2", "deepseek-v3"]
"""What a plain run tests."""


def other_config(name: str, **fields: Any) -> Any:
    tiny = OTHERS[name]
    tokens = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None}
    return transformers.AutoConfig.for_model(
        tiny.model_type, **{**tiny.sizes, **tokens, "initializer_range": 0.2, **tiny.fields, **fields}
    )


def make_other_model(folder: Path, name: str, **fields: Any) -> Any:
    """Writes a model with random weights and a tokenizer; returns it, in float32, with eager attention."""
    torch.manual_seed(sorted(OTHERS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(
        other_config(name, **fields), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model
