from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_texts import PLAIN_TEXTS, TEXTS
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from streamllm.errors import ModelLoadError
from streamllm.text import byte_level
from streamllm.text.byte_level import GGUF_PRE_TOKENIZERS
from streamllm.text.gguf_tokenizer import build_tokenizer
from streamllm.text.sentencepiece_backend import merges_from_scores
from streamllm.text.tokenizer import Tokenizer

NUMBERS = ["2024-01-31", "3.14159 and 1000000", "½ ² Ⅳ ٣٤٥"]
PRE_TOKENIZER_CASES = ["HTTPServer don't I'LL", "a/b//c\n/", "nai\u0308ve e\u0301", "हिन्दी", "x's  \r\n'Tis"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(default_model_path)


@pytest.fixture(scope="module")
def default_reference(default_model_path: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What Transformers reads in the GGUF: architecture, tokenizer, its configuration."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_gguf_tokenizer

    return get_gguf_tokenizer(str(default_model_path))


@pytest.fixture(scope="module")
def smollm2(default_reference) -> Backend:
    """SmolLM2's tokenizer.json cuts text by Digits and ByteLevel; the rest of it is in the GGUF."""
    _, metadata, _ = default_reference
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    reference = Backend(models.BPE({token: index for index, token in enumerate(metadata["tokens"])}, merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens(metadata["tokens"][:17])
    return reference


def test_the_default_model_equals_its_own_tokenizer_json(default_tokenizer, smollm2: Backend) -> None:
    assert default_tokenizer.vocab_size == smollm2.get_vocab_size() == 49152
    for text in [*TEXTS, *NUMBERS]:
        ids = default_tokenizer.encode(text)
        assert ids == smollm2.encode(text).ids
        for skip in (True, False):
            expected = smollm2.decode(ids, skip_special_tokens=skip)
            assert default_tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert [i for i in range(49152) if default_tokenizer.is_special(i)] == list(range(17))


@given(text=st.text())
def test_any_text_is_cut_as_by_its_own_tokenizer_json(default_tokenizer, smollm2: Backend, text: str) -> None:
    ids = default_tokenizer.encode(text)
    assert ids == smollm2.encode(text).ids
    assert default_tokenizer.decode(ids) == smollm2.decode(ids)


def test_the_default_model_equals_transformers(default_tokenizer, default_reference) -> None:
    """Transformers leaves out this GGUF's rule for digits, so the texts have none."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    architecture, metadata, config = default_reference
    reference, _ = convert_gguf_tokenizer(architecture, metadata)
    texts = [text for text in TEXTS if not any(character.isnumeric() for character in text)]
    assert len(texts) >= 5
    for text in texts:
        ids = default_tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert default_tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert default_tokenizer.adds_bos is config["add_bos_token"]
    assert default_tokenizer.chat_template == config["chat_template"]
    for name, token in default_tokenizer.special_token_strings.items():
        assert token == config[name]
    assert default_tokenizer.eos_token_ids == (reference.token_to_id(config["eos_token"]),)


def test_the_default_model_adds_no_bos(default_tokenizer) -> None:
    assert not default_tokenizer.adds_bos
    assert default_tokenizer.encode("") == []
    assert default_tokenizer.special_token_strings["eos_token"] == "<|im_end|>"


def byte_level_metadata(backend: Backend, **changes: Any) -> dict[str, Any]:
    """A GGUF's metadata for a trained byte-level tokenizer; values of ``None`` are left out."""
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    types = [
        NORMAL if index not in added else CONTROL if added[index].special else USER_DEFINED
        for index in range(len(tokens))
    ]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    } | changes
    return {key: value for key, value in metadata.items() if value is not None}


def test_gpt2(byte_level_backend: Backend) -> None:
    tokenizer = build_tokenizer(byte_level_metadata(byte_level_backend))
    for text in [*TEXTS, *NUMBERS, "<think>é!</think>"]:
        ids = tokenizer.encode(text)
        assert ids == byte_level_backend.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.is_special(i) for i in (0, 1, 2, 3)] == [True, True, True, False]
    assert not tokenizer.is_special(byte_level_backend.token_to_id("<think>"))


def split(pattern: str) -> Any:
    """The pre-tokenizer of Llama 3's, Qwen's and Mistral's tokenizer.json."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# The patterns as the models' own files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "pattern", "nfc", "ignore_merges", "adds_bos"),
    [
        ("llama-bpe", LLAMA3, False, True, True),
        ("qwen2", QWEN2, True, False, False),
        ("tekken", TEKKEN, False, True, True),
        ("dbrx", LLAMA3, False, False, False),
        ("gpt-4o", O200K, False, False, False),
    ],
)
def test_pre_tokenizers(byte_level_backend, pre, pattern, nfc, ignore_merges, adds_bos) -> None:
    tokenizer = build_tokenizer(byte_level_metadata(byte_level_backend, **{"tokenizer.ggml.pre": pre}))
    reference = Backend.from_str(byte_level_backend.to_str())
    reference.pre_tokenizer = split(pattern)
    reference.model.ignore_merges = ignore_merges
    if nfc:
        reference.normalizer = normalizers.NFC()
    for text in [*PRE_TOKENIZER_CASES, *TEXTS, *NUMBERS]:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text).ids
    assert tokenizer.adds_bos is adds_bos
    changed = byte_level_metadata(
        byte_level_backend, **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": not adds_bos}
    )
    assert build_tokenizer(changed).adds_bos is not adds_bos


def test_pre_tokenizers_cut_as_in_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    names = GGUF_PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "dbrx"} <= names
    for name in names:
        backend = byte_level.build_backend({}, [], GGUF_PRE_TOKENIZERS[name])
        reference = split(GGUF_PRE_TOKENIZER_SPLITS[name])
        for text in [*PRE_TOKENIZER_CASES, *TEXTS, *NUMBERS]:
            assert backend.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenize_str(text), name


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("deepseek-v3", "a 12345,b漢字か?x\n\n  y", "a| |123|45|,b|漢字か|?x|\n\n| | y"),
        ("deepseek-coder", "a 12,\n b漢字", "a| |1|2|,|\n| b|漢字"),
        ("refact", "a 12345,b", "a| |1|2|3|4|5|,|b"),
        ("command-r", "e\u0301 12", "é| |1|2"),
    ],
)
def test_pre_tokenizers_that_transformers_does_not_have(pre: str, text: str, pieces: str) -> None:
    backend = byte_level.build_backend({}, [], GGUF_PRE_TOKENIZERS[pre])
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
    cut = backend.pre_tokenizer.pre_tokenize_str(normalized)
    assert "|".join(decoders.ByteLevel().decode([piece]) for piece, _ in cut) == pieces


def test_digits_of_llama_cpps_default(byte_level_backend) -> None:
    """Punctuation stands alone, digits go by threes."""
    tokenizer = build_tokenizer(byte_level_metadata(byte_level_backend, **{"tokenizer.ggml.pre": "default"}))
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str("a 12345,b")
    assert [piece for piece, _ in pieces] == ["a", "Ġ", "123", "45", ",", "b"]


def test_rows_that_pad_the_vocabulary_are_no_tokens(byte_level_backend) -> None:
    metadata = byte_level_metadata(byte_level_backend)
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD0]", "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] += [UNUSED, UNUSED]
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.vocab_size == size
    assert tokenizer.contains(size - 1) and not tokenizer.contains(size)


def test_ids_between_tokens_have_none(byte_level_backend) -> None:
    """A padding row in the middle, an empty token: nothing is decoded for them, and no text gives them."""
    metadata = byte_level_metadata(byte_level_backend)
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD0]", "", "<extra>"]
    metadata["tokenizer.ggml.token_type"] += [UNUSED, NORMAL, USER_DEFINED]
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.vocab_size == size + 3
    assert [tokenizer.contains(size + index) for index in range(3)] == [False, False, True]
    assert tokenizer.decode([size, size + 1, size + 2], skip_special_tokens=False) == "<extra>"
    assert tokenizer.encode("<extra>") == [size + 2]
    assert not {size, size + 1} & set(tokenizer.encode("[PAD0]"))


def test_special_ids_that_mean_none(byte_level_backend) -> None:
    changes = {"tokenizer.ggml.padding_token_id": 0xFFFFFFFF, "tokenizer.ggml.bos_token_id": -1}
    tokenizer = build_tokenizer(byte_level_metadata(byte_level_backend, **changes))
    assert tokenizer.bos_token_id is None and "pad_token" not in tokenizer.special_token_strings


def test_all_end_tokens_count(byte_level_backend) -> None:
    changes = {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.eom_token_id": 2,
    }
    assert build_tokenizer(byte_level_metadata(byte_level_backend, **changes)).eos_token_ids == (0, 2)


def sentencepiece_metadata(backend: Backend, **changes: Any) -> dict[str, Any]:
    """Metadata with scores in place of merges: the earlier a piece was learnt, the higher its score."""
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    types += [NORMAL] * (len(tokens) - len(types))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0 if kind != NORMAL else -float(i) for i, kind in enumerate(types)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def sentencepiece_bpe(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm in its plainest form: merge the best-scored neighbours, leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[left + right], -index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces: list[str] = []
    for symbol in symbols:
        pieces += [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


def test_sentencepiece(byte_fallback_backend: Backend) -> None:
    metadata = sentencepiece_metadata(byte_fallback_backend)
    tokenizer = build_tokenizer(metadata)
    scores = {
        token: score
        for token, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == NORMAL
    }
    assert tokenizer.adds_bos and tokenizer.encode("") == [1]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == byte_fallback_backend.encode(text).ids
        assert tokenizer.decode(ids) == byte_fallback_backend.decode(ids)
        if text and "<" not in text:
            assert [tokenizer._backend.id_to_token(i) for i in ids[1:]] == sentencepiece_bpe(text, scores)


def test_sentencepiece_without_a_space_in_front(byte_fallback_backend: Backend) -> None:
    metadata = sentencepiece_metadata(byte_fallback_backend, **{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("The dog", add_special_tokens=False)
    assert tokenizer.token_text(ids[0])[0] == "T"
    assert tokenizer.decode(tokenizer.encode(" The dog")) == " The dog"


def test_phi3s_special_tokens_swallow_the_white_space_behind_them(byte_fallback_backend: Backend) -> None:
    """Its tokenizer.json says so (``rstrip``), a GGUF cannot: known by the architecture."""
    metadata = sentencepiece_metadata(byte_fallback_backend, **{"general.architecture": "phi3"})
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|end|>"]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], -1000.0]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], CONTROL]
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode("a<|end|>\n\nb") == tokenizer.encode("a<|end|>b")
    assert tokenizer.encode("<s>\nb") != tokenizer.encode("<s>b")


def test_unigram(unigram_backend: Backend) -> None:
    model = json.loads(unigram_backend.to_str())["model"]
    tokens, scores = zip(*model["vocab"], strict=True)
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = build_tokenizer(metadata)
    for text in PLAIN_TEXTS:
        # The small tokenizer's Metaspace puts no second space in front.
        ids = tokenizer.encode(text.lstrip(" "))
        assert ids == [*unigram_backend.encode(text.lstrip(" ")).ids, 2]
        assert tokenizer.decode(ids) == unigram_backend.decode(ids)


def test_merges_from_scores_equal_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    pieces = ["a", "b", "c", "ab", "bc", "abc", "aa", "aaa", "aab", "cab", "abcab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    scores = dict(zip(pieces, [-0.5, -0.4, -0.3, -1, -3, -2, -4, -5, -8, -6, -7], strict=True))
    assert merges_from_scores(vocabulary, scores) == generate_merges(vocabulary, scores)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "kimi-k9"}, "'kimi-k9'.*not supported"),
        ({"tokenizer.ggml.pre": None}, "does not name its pre-tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'.*not supported"),
        ({"tokenizer.ggml.model": None}, "not supported"),
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "but 1 token types"),
        ({"tokenizer.ggml.merges": ["nothing known"]}, "do not fit together"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.bos_token_id": 99999}, "bos_token_id is 99999, but it has"),
        (
            {"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": None},
            "'a' has two ids, 0 and 2",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(byte_level_backend, changes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build_tokenizer(byte_level_metadata(byte_level_backend, **changes))


def test_errors_name_the_file(byte_level_backend, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("unheard-of")
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"model\.gguf: .*'unheard-of'"):
        Tokenizer.from_gguf(tmp_path / "model.gguf")
