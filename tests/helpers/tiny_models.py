"""Tiny random models that transformers writes: complete folders with weights, configs and a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Those that only fields of one config tell apart."""

VOCAB_SIZE = 320
EOS_TOKEN = "<|im_end|>"


@dataclass(frozen=True)
class TinyFamily:
    """
    Attributes:
        config: name of the transformers config.
        model: name of the transformers model.
        fields: of the config, besides those that all families have.
        without: those that this family does not have.
    """

    config: str
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def _family(name: str, **fields: Any) -> TinyFamily:
    return TinyFamily(f"{name}Config", f"{name}ForCausalLM", fields)


WINDOW = 24
"""Positions that layers with a window see."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_NOT_GPT2 = ("intermediate_size", "num_key_value_heads")
_NOT_OPT = (*_NOT_GPT2, "initializer_range")
TINY: dict[str, TinyFamily] = {
    "llama": _family("Llama"),
    "mistral": _family("Mistral", sliding_window=None),
    "ministral": _family("Ministral", head_dim=16, sliding_window=WINDOW, layer_types=[_FULL, _SLIDING]),
    "ministral3": _family(
        "Ministral3",
        head_dim=16,
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3", head_dim=32),
    "smollm3": _family("SmolLM3", pad_token_id=None, num_hidden_layers=3, no_rope_layers=[1, 0, 1]),
    "phi3": _family("Phi3", pad_token_id=0, sliding_window=WINDOW, partial_rotary_factor=0.5),
    "gemma2": _family("Gemma2", head_dim=32, query_pre_attn_scalar=24, sliding_window=WINDOW),
    "gemma3": TinyFamily(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _FULL],
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo2": _family("Olmo2"),
    "olmo3": _family(
        "Olmo3",
        sliding_window=WINDOW,
        layer_types=[_SLIDING, _FULL],
        rope_parameters={_FULL: _YARN, _SLIDING: {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "granite": _family(
        "Granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "granite4": _family(
        "GraniteMoeHybrid",
        layer_types=[_FULL] * 2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
        mamba_n_heads=4,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "opt": TinyFamily("OPTConfig", "OPTForCausalLM", {"ffn_dim": 96, "init_std": 0.2}, _NOT_OPT),
    "opt-post-norm": TinyFamily(
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 96, "init_std": 0.2, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
        _NOT_OPT,
    ),
    "gpt2": TinyFamily("GPT2Config", "GPT2LMHeadModel", {"n_inner": 96}, _NOT_GPT2),
    "mixtral": _family("Mixtral", num_local_experts=4, sliding_window=WINDOW),
    "qwen2moe": _family(
        "Qwen2Moe",
        num_hidden_layers=3,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "qwen3moe": _family(
        "Qwen3Moe",
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
        norm_topk_prob=True,
    ),
    "gpt-oss": _family(
        "GptOss",
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        swiglu_limit=1.5,
        rope_parameters={**_YARN, "truncate": False},
    ),
}
"""Every family, small, in a shape that shows what is special about it."""

_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", EOS_TOKEN]
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind the fox at all.",
    "A language model predicts the next token; a server streams it to the one who asked.",
    "Größe, naïve, 東京, привет, 🙂: bytes that no merge has seen fall back to single bytes.",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    tied: bool = False,
    sharded: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    seed: int = 0,
    **config_fields: Any,
) -> Path:
    """Writes a model with 2 layers and about 100,000 random weights, and returns ``folder``.

    Args:
        tied: the embedding serves as the head (and no head is stored).
        sharded: several safetensors files and an index instead of one file.
        config_fields: any field of the family's transformers config, such as ``sliding_window=8`` or
            ``rope_parameters={...}``.
    """
    import torch

    torch.manual_seed(seed)
    model = new_tiny_model(family, tied=tied, **config_fields).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "5GB")
    save_tokenizer(folder)
    return folder


def new_tiny_model(family: str = "llama", *, tied: bool = False, **config_fields: Any) -> Any:
    """A transformers model with random weights, its biases and norms random too."""
    import torch
    import transformers

    tiny = TINY[family]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "tie_word_embeddings": tied,
    }
    for name in tiny.without:
        del fields[name]
    config = getattr(transformers, tiny.config)(**fields | tiny.fields | config_fields)
    model = getattr(transformers, tiny.model)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def load_reference(folder: Path) -> Any:
    """The same folder in transformers, float32, eager attention."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` tokens with a ChatML template."""
    import json

    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": EOS_TOKEN,
        "pad_token": "<|endoftext|>",
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer.to_str()
