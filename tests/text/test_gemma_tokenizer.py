"""Gemma 3's 262,144 tokens, read from its GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_texts import TEXTS

from streamllm.text.tokenizer import Tokenizer

# [text, ids without BOS] as Transformers gives them: the slow test below compares them with it.
RECORDED: list[tuple[str, list[int]]] = json.loads((Path(__file__).parent / "gemma3_ids.json").read_text())


@pytest.fixture(scope="module")
def tokenizer(gemma_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(gemma_model_path)


def test_recorded_ids(tokenizer: Tokenizer) -> None:
    for text, ids in RECORDED:
        assert tokenizer.encode(text) == [2, *ids], text
        assert tokenizer.decode([2, *ids]) == tokenizer.decode(ids)
        special = [token_id for token_id in ids if tokenizer.is_special(token_id)]
        if not special and "▁" not in text:
            assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 262144
    assert tokenizer.adds_bos and tokenizer.bos_token_id == 2 and tokenizer.eos_token_ids == (1,)


@pytest.mark.slow
def test_equals_transformers(tokenizer: Tokenizer, gemma_model_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, metadata, config = get_gguf_tokenizer(str(gemma_model_path))
    reference: Any = convert_gguf_tokenizer(architecture, metadata)[0]
    assert reference.get_vocab_size() == tokenizer.vocab_size
    assert config["add_bos_token"] is True
    tokens = [token.replace("▁", " ") for token in metadata["tokens"]]
    joined = ["".join(tokens[start : start + 600 : 60]) for start in range(0, 262144, 997)]
    runs = [f"x{' ' * length}{chr(10) * (length // 3)}b\t" for length in range(70)]
    for text in [*TEXTS, *(text for text, _ in RECORDED), *runs, *joined]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    for text, ids in RECORDED:
        assert reference.encode(text, add_special_tokens=False).ids == ids
    added = reference.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    assert {token_id for token_id in range(262144) if tokenizer.is_special(token_id)} == special
