"""A Llama with random weights: its shape, and a folder of it that transformers writes."""

from __future__ import annotations

import itertools
import json
import string
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama without tied embeddings."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def step_weights(self) -> int:
        """Weights of the matrices that every step multiplies with: all but the embedding."""
        attention = self.hidden_size * (self.qkv_width + self.num_heads * self.head_dim)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size


LLAMA_8B = ModelShape("Llama-3-8B", 128256, 4096, 14336, 32, 32, 8, 128)
TINY = ModelShape("tiny", 512, 64, 96, 2, 4, 2, 16)


def make_model(folder: Path, shape: ModelShape, device: str) -> Path:
    """Writes weights in bfloat16, the config, and a tokenizer with as many tokens as the model has; returns
    ``folder``.

    Args:
        device: where the random numbers are drawn; 8 billion take seconds on a GPU, minutes on a CPU.
    """
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
    model.save_pretrained(folder)
    _save_tokenizer(folder, shape.vocab_size)
    return folder


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, and made-up words that only a model can choose: a text's bytes are its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    first = ["<|begin|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = ("Ġ" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    vocab = {
        token: index
        for index, token in enumerate([*first, *itertools.islice(words, vocab_size - len(first))])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(first[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": first[0], "eos_token": first[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
