"""Small tokenizers of the three usual kinds, trained here and saved as Transformers saves them."""

from __future__ import annotations

import json

import pytest
from sample_texts import CORPUS
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)


@pytest.fixture(scope="session")
def byte_level_backend() -> Tokenizer:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é!", normalized=False)])
    return backend


@pytest.fixture(scope="session")
def byte_fallback_backend() -> Tokenizer:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral have it."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    # Only the first texts: the others' characters have no token and fall back to bytes.
    trained.train_from_iterator(CORPUS[:4], trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].get)
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


@pytest.fixture(scope="session")
def unigram_backend() -> Tokenizer:
    """SentencePiece's other model, with a Metaspace decoder."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="session")
def byte_level_tokenizer(byte_level_backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory):
    """The byte-level tokenizer, loaded from a folder by the code under test."""
    from streamllm.text.tokenizer import Tokenizer as Loaded

    folder = tmp_path_factory.mktemp("byte_level")
    byte_level_backend.save(str(folder / "tokenizer.json"))
    return Loaded.from_folder(folder)


@pytest.fixture(scope="session")
def byte_fallback_tokenizer(byte_fallback_backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory):
    """The byte-fallback tokenizer, loaded from a folder by the code under test."""
    from streamllm.text.tokenizer import Tokenizer as Loaded

    folder = tmp_path_factory.mktemp("byte_fallback")
    byte_fallback_backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return Loaded.from_folder(folder)
