"""Tiny random models that transformers writes: complete folders with weights, configs and a tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")

VOCAB_SIZE = 320
EOS_TOKEN = "<|im_end|>"
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
    family: Family = "llama",
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


def new_tiny_model(family: Family = "llama", *, tied: bool = False, **config_fields: Any) -> Any:
    """A transformers model with random weights, its biases and norms random too."""
    import torch
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
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
    if family == "mistral":
        fields["sliding_window"] = None
    if family == "qwen3":
        fields["head_dim"] = 32
    config = getattr(transformers, f"{name}Config")(**fields | config_fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                center = 1.0 if "norm" in parameter_name else 0.0
                parameter.copy_(center + 0.2 * torch.randn_like(parameter))
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
