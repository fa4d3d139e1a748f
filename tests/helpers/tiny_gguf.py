"""The tiny models as GGUF files, written as llama.cpp's ``convert_hf_to_gguf.py`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from helpers.tiny_models import Family, new_tiny_model, save_tokenizer

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
_MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def save_tiny_gguf(
    path: Path,
    family: Family = "llama",
    *,
    tied: bool = False,
    quantization: str = "F32",
    extra_metadata: dict[str, Any] | None = None,
    **config_fields: Any,
) -> Any:
    """Writes a tiny model to ``path`` and returns it (a transformers model with the unquantised weights).

    Args:
        quantization: GGML's name of the matrices' type, such as ``"F16"``, ``"Q8_0"``, ``"Q4_1"``.
        extra_metadata: floats and strings under the architecture's prefix, as ``{"rope.freq_base": 1e6}``.
    """
    import gguf
    import torch

    torch.manual_seed(0)
    model = new_tiny_model(family, tied=tied, **config_fields)
    architecture = "llama" if family in ("llama", "mistral") else family
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, model.config)
    for name, value in (extra_metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{name}", value)
    _write_tokenizer(writer, path.parent)
    for name, values in _tensors(model, architecture, tied):
        chosen = gguf.GGMLQuantizationType[quantization if values.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


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
    writer.add_rope_dimension_count(head_dim)


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


def _tensors(model: Any, architecture: str, tied: bool) -> list[tuple[str, np.ndarray]]:
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = []
    for name, parameter in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        if tied and stem == "lm_head":
            continue
        values = parameter.numpy()
        part = stem.rsplit(".", 1)[-1]
        if architecture == "llama" and part in heads:
            values = _permute(values, heads[part])
        if stem in _MODEL_NAMES:
            gguf_stem = _MODEL_NAMES[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            gguf_stem = f"blk.{layer}.{_LAYER_NAMES[rest]}"
        tensors.append((f"{gguf_stem}.{kind}", np.ascontiguousarray(values)))
    return tensors


def _permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's converter."""
    shaped = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return shaped.swapaxes(1, 2).reshape(values.shape)
