"""Folders with SentencePiece's tokenizer.model and no tokenizer.json."""

from __future__ import annotations

import io
import json
import random
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_texts import CORPUS, TEXTS
from sentencepiece import sentencepiece_model_pb2

from streamllm.errors import ModelLoadError
from streamllm.text.sentencepiece_model import read_model
from streamllm.text.tokenizer import Tokenizer

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "split_digits": True, **IDENTITY
    },
    "gemma": {
        "model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "add_dummy_prefix": False,
        "user_defined_symbols": ["\n\n", "▁▁", "▁▁▁", "<table>", ".*"],
        "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, **IDENTITY,
    },
    "bpe": {"model_type": "bpe", "vocab_size": 500},
    "unigram": {"model_type": "unigram", "vocab_size": 300, "user_defined_symbols": ["<sep>"]},
    "unigram with bytes": {
        "model_type": "unigram", "vocab_size": 500, "byte_fallback": True,
        "normalization_rule_name": "nfkc_cf",
    },
}  # fmt: skip
SPACES_AND_SYMBOLS = [
    " a  b",
    "   a\n\n\nb ",
    "\n",
    ".*a<table> .* <sep>a <sep>",
    "▁a",
    "▁▁▁ a",
    "a<s> b</s>",
]


class Trained(NamedTuple):
    """A model file, as bytes and opened by SentencePiece."""

    data: bytes
    processor: sentencepiece.SentencePieceProcessor


def train(**settings: Any) -> Trained:
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=data, minloglevel=2, hard_vocab_limit=False, **settings
    )
    return Trained(data.getvalue(), sentencepiece.SentencePieceProcessor(model_proto=data.getvalue()))


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    return {kind: train(**settings) for kind, settings in KINDS.items()}


def write_folder(folder: Path, data: bytes, model_type: str = "mistral", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **config}))
    return folder


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_sentencepiece_and_transformers(trained, tmp_path: Path, kind: str) -> None:
    data, processor = trained[kind]
    folder = write_folder(tmp_path, data, add_bos_token=True)
    tokenizer, reference = Tokenizer.from_folder(folder), transformers_tokenizer(folder)
    assert tokenizer.vocab_size == len(reference) == processor.vocab_size()
    assert tokenizer.bos_token_id == processor.bos_id()
    assert tokenizer.eos_token_ids == (processor.eos_id(),)
    special = {token_id for token_id, token in reference.added_tokens_decoder.items() if token.special}
    assert {i for i in range(len(reference)) if tokenizer.is_special(i)} == special
    for text in [*TEXTS, *SPACES_AND_SYMBOLS]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        if "<s>" not in text:
            assert ids[1:] == processor.encode(text), text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )


@pytest.fixture(scope="module")
def loaded(trained, tmp_path_factory) -> dict[str, tuple[Tokenizer, sentencepiece.SentencePieceProcessor]]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    return {
        kind: (Tokenizer.from_folder(write_folder(folder / kind, data, add_bos_token=False)), processor)
        for kind, (data, processor) in trained.items()
    }


# The tokenizers package, and with it Transformers, applies a character map to whole graphemes and may lose
# what follows their first character; and SentencePiece strips a ``▁`` of the text itself like a space. So
# models with such rules get letters that stand alone.
LETTERS = sorted(c for c in {*"".join(CORPUS)} if c.isprintable() and (ord(c) < 0x500 or "一" <= c <= "龥"))
LETTERS = [c for c in LETTERS if not unicodedata.combining(c)]
ANYTHING = sorted({*"".join(CORPUS), *" ▁\n.*ﬁ漢"})


@given(text=st.text(alphabet=ANYTHING), letters=st.text(alphabet=[*LETTERS, "\n", "ﬁ"]))
@settings(max_examples=60, deadline=None)
def test_any_text_is_cut_as_by_sentencepiece(loaded, text: str, letters: str) -> None:
    for kind, (tokenizer, processor) in loaded.items():
        sample = text if kind in ("llama", "gemma") else letters
        assert tokenizer.encode(sample) == processor.encode(sample)


def test_where_the_space_in_front_goes(trained, tmp_path: Path) -> None:
    """Before each part between special tokens, or (``legacy: false``) only before the first."""
    encoded = []
    for legacy in (True, False):
        folder = write_folder(tmp_path, trained["llama"].data, add_bos_token=True, legacy=legacy)
        tokenizer, reference = Tokenizer.from_folder(folder), transformers_tokenizer(folder)
        for text in ("dog</s>dog", "</s>dog dog", " dog"):
            assert tokenizer.encode(text) == reference.encode(text)
        encoded.append(tokenizer.encode("dog</s>dog"))
    assert encoded[0] != encoded[1]
    folder = write_folder(
        tmp_path, trained["llama"].data, "llama", add_bos_token=True, add_prefix_space=False
    )
    tokenizer, reference = Tokenizer.from_folder(folder), transformers_tokenizer(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)
    assert tokenizer.decode(tokenizer.encode(" dog")) == " dog"


def test_bos_and_eos(trained, tmp_path: Path) -> None:
    """Llama's and Gemma's classes put BOS in front where the configuration does not say."""
    data = trained["llama"].data
    assert Tokenizer.from_folder(write_folder(tmp_path, data)).adds_bos
    assert not Tokenizer.from_folder(write_folder(tmp_path, data, add_bos_token=False)).adds_bos
    assert not Tokenizer.from_folder(write_folder(tmp_path, data, tokenizer_class="Other")).adds_bos
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, data, add_eos_token=True))
    assert tokenizer.encode("") == [1, 2]
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).encode("") == [1]


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_added_tokens(trained, tmp_path: Path, file: str) -> None:
    data, processor = trained["llama"]
    size = processor.vocab_size()
    tokens = {"<|im_end|>": size + 1, "<|im_start|>": size, "<tool>": size + 2}
    special = {"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"}
    if file == "added_tokens.json":
        write_folder(tmp_path, data, add_bos_token=True)
        (tmp_path / file).write_text(json.dumps(tokens))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    else:
        listed = {
            str(token_id): {"content": token, "special": token != "<tool>", "normalized": True}
            for token, token_id in tokens.items()
        }
        for token_id, token in enumerate(("<unk>", "<s>", "</s>")):
            listed[str(token_id)] = {"content": token, "special": True}
        write_folder(tmp_path, data, add_bos_token=True, added_tokens_decoder=listed, **special)
    tokenizer, reference = Tokenizer.from_folder(tmp_path), transformers_tokenizer(tmp_path)
    assert tokenizer.vocab_size == len(reference) == size + 3
    assert tokenizer.eos_token_ids == (size + 1,) == (reference.eos_token_id,)
    assert [tokenizer.is_special(size + index) for index in range(3)] == [True, True, False]
    for text in ("<|im_start|>user\nHi  <tool> x<|im_end|>", " <tool>", *TEXTS):
        assert tokenizer.encode(text) == reference.encode(text), text


def test_pieces_get_the_names_that_the_configuration_gives(trained, tmp_path: Path) -> None:
    data, processor = trained["llama"]
    spare = processor.vocab_size() - 1
    listed = {str(spare): {"content": "<|end|>", "special": True}}
    folder = write_folder(tmp_path, data, add_bos_token=True, added_tokens_decoder=listed)
    tokenizer, reference = Tokenizer.from_folder(folder), transformers_tokenizer(folder)
    assert tokenizer.vocab_size == len(reference)
    for text in ("a<|end|>b", *TEXTS):
        assert tokenizer.encode(text) == reference.encode(text), text
    assert spare in tokenizer.encode("a<|end|>b")


def changed(data: bytes, change: Any) -> bytes:
    model = sentencepiece_model_pb2.ModelProto.FromString(data)
    change(model)
    return model.SerializeToString()


def test_what_is_not_supported_is_named(trained, tmp_path: Path) -> None:
    data = trained["llama"].data

    def message(data: bytes, **config: Any) -> str:
        with pytest.raises(ModelLoadError) as caught:
            Tokenizer.from_folder(write_folder(tmp_path, data, **config))
        assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    assert "'word' are not supported" in message(
        changed(data, lambda m: setattr(m.trainer_spec, "model_type", 3))
    )
    assert "space behind a word" in message(
        changed(data, lambda m: setattr(m.trainer_spec, "treat_whitespace_as_suffix", True))
    )
    assert "has two ids, 0 and 700" in message(changed(data, lambda m: m.pieces.add(piece="<unk>")))
    assert "special id 9999" in message(changed(data, lambda m: setattr(m.trainer_spec, "bos_id", 9999)))
    assert "do not fit together" in message(
        changed(data, lambda m: setattr(m.normalizer_spec, "precompiled_charsmap", b"\xff"))
    )
    assert "tiktoken" in message(b"IQ== 0\nIg== 1\nIw== 2\n")
    assert "XGLMTokenizer is not supported" in message(data, tokenizer_class="XGLMTokenizerFast")
    wrong = {"705": {"content": "<tool>", "special": False}}
    assert "'<tool>' the id 705" in message(data, added_tokens_decoder=wrong)
    assert "'<s>' has two ids, 1 and 5" in message(data, added_tokens_decoder={"5": {"content": "<s>"}})
    assert "bos_token '<none>'" in message(data, bos_token="<none>")


def test_a_damaged_file_is_refused(trained, tmp_path: Path) -> None:
    """Cut short anywhere, or with bytes changed: an error of one line, or a model that still stands."""
    path, data = tmp_path / "tokenizer.model", trained["unigram"].data
    rng = random.Random(7)
    for length in [0, 1, len(data) - 1, *(rng.randrange(len(data)) for _ in range(200))]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match=r"tokenizer\.model is damaged"):
            read_model(path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for _ in range(100):
        damaged = bytearray(data)
        damaged[rng.randrange(6000)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            Tokenizer.from_folder(tmp_path)
        except ModelLoadError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error)
