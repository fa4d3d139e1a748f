from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_texts import PLAIN_TEXTS, TEXTS

from streamllm.errors import InvalidRequestError, ModelLoadError
from streamllm.text.tokenizer import Tokenizer


@pytest.fixture(params=["byte_level", "byte_fallback", "unigram"])
def saved(request: pytest.FixtureRequest, tmp_path: Path):
    """A folder written by Transformers, and Transformers' own tokenizer of it."""
    from transformers import PreTrainedTokenizerFast

    names = ("<|endoftext|>", "<|im_end|>") if request.param == "byte_level" else ("<s>", "</s>")
    backend = request.getfixturevalue(f"{request.param}_backend")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=names[0], eos_token=names[1]).save_pretrained(
        tmp_path
    )
    return tmp_path, PreTrainedTokenizerFast.from_pretrained(tmp_path)


def test_ids_and_text_equal_transformers(saved) -> None:
    folder, reference = saved
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)
    special = {token_id for token_id, token in reference.added_tokens_decoder.items() if token.special}
    assert {i for i in range(len(reference)) if tokenizer.is_special(i)} == special == {0, 1, 2}
    for text in TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_text_survives_the_round_trip(byte_level_tokenizer, byte_fallback_tokenizer) -> None:
    for tokenizer in (byte_level_tokenizer, byte_fallback_tokenizer):
        for text in PLAIN_TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_any_text_survives_the_round_trip(byte_level_tokenizer, byte_fallback_tokenizer, text: str) -> None:
    for tokenizer in (byte_level_tokenizer, byte_fallback_tokenizer):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_bytes_of_single_tokens(byte_level_tokenizer, byte_level_backend, byte_fallback_tokenizer) -> None:
    tokenizer = byte_level_tokenizer
    ids = tokenizer.encode(" 🦊")
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == " 🦊".encode()
    assert tokenizer.token_text(ids[-1]) == "\ufffd"
    # An added token is text as it stands, though é is also the alphabet's letter for the byte E9.
    assert tokenizer.token_bytes(byte_level_backend.token_to_id("é!")) == "é!".encode()
    assert tokenizer.token_bytes(byte_level_backend.token_to_id("<think>")) == b"<think>"
    fallback = byte_fallback_tokenizer
    pieces = [fallback.token_bytes(i) for i in fallback.encode("😀", add_special_tokens=False)]
    assert pieces == [b" ", b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_ids_without_a_token(byte_level_tokenizer) -> None:
    size = byte_level_tokenizer.vocab_size
    assert byte_level_tokenizer.contains(0) and byte_level_tokenizer.contains(size - 1)
    for token_id in (-1, size, 2**63):
        assert not byte_level_tokenizer.contains(token_id)
        assert byte_level_tokenizer.token_bytes(token_id) == b""


@pytest.mark.parametrize("text", ["\ud800", "before \udc97 after", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(byte_level_tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D[89CE]") as caught:
        byte_level_tokenizer.encode(text)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError) as caught:
        byte_level_tokenizer.encode_chat(text)
    assert caught.value.param == "messages"


def test_empty_text(byte_level_tokenizer, byte_fallback_tokenizer) -> None:
    assert byte_level_tokenizer.encode("") == []
    assert not byte_level_tokenizer.adds_bos
    assert byte_fallback_tokenizer.encode("") == [byte_fallback_tokenizer.bos_token_id] == [1]
    assert byte_fallback_tokenizer.adds_bos


def test_chat_prompts_have_exactly_one_bos(byte_level_tokenizer, byte_fallback_tokenizer) -> None:
    assert byte_fallback_tokenizer.encode_chat("<s>hello") == byte_fallback_tokenizer.encode_chat("hello")
    assert byte_fallback_tokenizer.encode_chat("hello").count(1) == 1
    assert byte_level_tokenizer.encode_chat("hello") == byte_level_tokenizer.encode("hello")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokenizer_json_decides_about_bos(request, tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    names = ("<|endoftext|>", "<|im_end|>") if kind == "byte_level" else ("<s>", "</s>")
    request.getfixturevalue(f"{kind}_backend").save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": names[0], "__type": "AddedToken"},
        "eos_token": names[1],
        "add_bos_token": kind == "byte_level",
        "add_eos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.adds_bos is (kind == "byte_fallback")
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)


def test_the_configuration_may_add_tokens(byte_level_backend, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    byte_level_backend.save(str(tmp_path / "tokenizer.json"))
    size = byte_level_backend.get_vocab_size()
    added = {
        str(size): {"content": "<tool>", "special": True, "normalized": False},
        str(size + 1): {"content": "<x>", "special": False, "lstrip": True},
    }
    config = {"eos_token": "<tool>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eos_token_ids == (size,)
    assert tokenizer.is_special(size) and not tokenizer.is_special(size + 1)
    for text in ("a <tool> b", "a  <x> b", "<x><tool>"):
        assert tokenizer.encode(text) == reference.encode(text)


def test_a_named_token_is_special_though_tokenizer_json_does_not_say_so(byte_level_backend, tmp_path) -> None:
    byte_level_backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<think>", "pad_token": "[PAD]"})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.is_special(byte_level_backend.token_to_id("<think>"))
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"
    assert tokenizer.vocab_size == byte_level_backend.get_vocab_size(), "no id beyond the model's embeddings"


def test_where_the_chat_template_is_found(byte_level_backend, tmp_path: Path) -> None:
    byte_level_backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "listed"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "configured"}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "configured"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja ž", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template == "from jinja ž"


def test_truncation_and_padding_in_tokenizer_json_are_ignored(byte_level_backend, tmp_path: Path) -> None:
    saved = json.loads(byte_level_backend.to_str())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (
        tokenizer.decode(tokenizer.encode("a text of more than four tokens"))
        == "a text of more than four tokens"
    )
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": '{"version": "1.0", "model":'}, "tokenizer.json is damaged"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": "["},
            "tokenizer_config.json cannot be read as JSON",
        ),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "must hold a JSON object"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, "Transformers"),
    ],
)
def test_damaged_folders_are_refused(byte_level_backend, tmp_path: Path, files: dict, message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(byte_level_backend.to_str() if text is None else text)
    with pytest.raises(ModelLoadError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_decoder_that_is_not_known_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="decoder WordPiece is not supported"):
        Tokenizer.from_folder(tmp_path)


def test_threads_may_share_a_tokenizer(byte_level_tokenizer) -> None:
    expected = [byte_level_tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert list(pool.map(byte_level_tokenizer.encode, TEXTS)) == expected
