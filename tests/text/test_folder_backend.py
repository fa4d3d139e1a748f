"""Folders with vocab.json and merges.txt and no tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_texts import TEXTS
from tokenizers import Tokenizer as Backend

from streamllm.errors import ModelLoadError
from streamllm.text.tokenizer import Tokenizer

# As in facebook/opt-125m's tokenizer_config.json.
OPT_TOKEN = {
    "lstrip": False,
    "normalized": True,
    "rstrip": False,
    "single_word": False,
    "__type": "AddedToken",
}
CASES = [
    "HTTPServer don't I'LL 12345",
    "  three\n\n\t spaces  ",
    "e\u0301 nai\u0308ve",
    "a<|im_end|> b<think>",
]


def write_folder(
    folder: Path, backend: Backend, model_type: str, config: dict[str, Any] | None, names: dict[str, str]
) -> Path:
    """The model in the old format, some tokens renamed."""
    folder.mkdir(exist_ok=True)
    model = json.loads(backend.to_str())["model"]
    vocabulary = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


OPT = {
    "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, "errors": "replace",
    **{f"{name}_token": {"content": "</s>", **OPT_TOKEN} for name in ("bos", "eos", "unk")},
    "pad_token": {"content": "<pad>", **OPT_TOKEN},
}  # fmt: skip
QWEN2 = {
    "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
}  # fmt: skip
KINDS = {
    "gpt2": ("gpt2", None, {}),
    "gpt2 with a space": ("gpt2", {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, {}),
    "opt": ("opt", OPT, {"<|endoftext|>": "<s>", "<|im_start|>": "<pad>", "<|im_end|>": "</s>"}),
    "qwen2": ("qwen3", QWEN2, {}),
    "gpt_neox": ("gpt_neox", {"tokenizer_class": "GPTNeoXTokenizer", "pad_token": None}, {}),
}


@pytest.fixture(scope="module")
def folders(byte_level_backend: Backend, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    return {kind: write_folder(root / kind, byte_level_backend, *case) for kind, case in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_transformers(folders: dict[str, Path], kind: str) -> None:
    from transformers import AutoTokenizer

    tokenizer, reference = Tokenizer.from_folder(folders[kind]), AutoTokenizer.from_pretrained(folders[kind])
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)
    special = {token_id for token_id, token in reference.added_tokens_decoder.items() if token.special}
    assert {i for i in range(len(reference)) if tokenizer.is_special(i)} == special
    for text in [*TEXTS, *CASES]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_opt_starts_with_bos(folders: dict[str, Path]) -> None:
    """The seed of every quick start: ``</s>``, id 2, in front of each prompt."""
    tokenizer = Tokenizer.from_folder(folders["opt"])
    assert tokenizer.adds_bos and tokenizer.encode("") == [2]
    assert tokenizer.bos_token_id == 2 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_token_strings["pad_token"] == "<pad>"


@given(text=st.text(max_size=30))
@settings(max_examples=50, deadline=None)
def test_any_text_is_cut_as_by_gpt2(folders: dict[str, Path], byte_level_backend: Backend, text: str) -> None:
    tokenizer = Tokenizer.from_folder(folders["gpt2"])
    added = ("<|", "<think>", "é!")
    if not any(token in text for token in added):
        assert tokenizer.encode(text) == byte_level_backend.encode(text).ids


def test_the_family_decides_where_no_class_is_named(byte_level_backend: Backend, tmp_path: Path) -> None:
    texts = ["don't", "DON'T 123", "e\u0301"]
    for model_type, kind in (("qwen2_moe", "Qwen2Tokenizer"), ("phi", "CodeGenTokenizer")):
        named = write_folder(tmp_path / "a", byte_level_backend, "x", {"tokenizer_class": kind}, {})
        unnamed = write_folder(tmp_path / "b", byte_level_backend, model_type, None, {})
        tokenizers = [Tokenizer.from_folder(folder) for folder in (named, unnamed)]
        for text in texts:
            assert len({tuple(tokenizer.encode(text)) for tokenizer in tokenizers}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges.txt": None}, "has a vocab.json but no merges.txt"),
        ({"vocab.json": None}, "has no tokenizer.json, nor the older"),
        ({"vocab.json": "{"}, "vocab.json or merges.txt beside it is damaged"),
        ({"merges.txt": "#version: 0.2\nonly-one-word\n"}, "vocab.json or merges.txt beside it is damaged"),
        ({"merges.txt": "not known\n"}, "do not fit together"),
        ({"vocab.json": '{"a": 0, "b": 0}', "merges.txt": ""}, "one id to two tokens"),
        ({"tokenizer_config.json": '{"tokenizer_class": "OddTokenizer"}'}, "tokenizer_class OddTokenizer"),
        ({"added_tokens.json": '{"<new>": 5000}'}, r"added_tokens.json gives the token '<new>' the id 5000"),
        ({"added_tokens.json": '{"<think>": "x"}'}, "added_tokens.json"),
        ({"vocab.json": None, "tekken.json": "{}"}, "tekken.json: a tokenizer of this kind is not read"),
        ({"vocab.json": None, "vocab.txt": "a"}, "vocab.txt: a tokenizer of this kind is not read"),
        ({"vocab.json": None, "qwen.tiktoken": ""}, "qwen.tiktoken: a tokenizer of this kind"),
    ],
)
def test_folders_that_cannot_be_read(byte_level_backend, tmp_path: Path, changes, message: str) -> None:
    write_folder(tmp_path, byte_level_backend, "gpt2", None, {})
    for name, text in changes.items():
        (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
