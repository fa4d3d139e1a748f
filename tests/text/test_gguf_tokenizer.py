from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_texts import TEXTS
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from streamllm.errors import ModelLoadError
from streamllm.text.gguf_tokenizer import build_tokenizer, merges_from_scores
from streamllm.text.tokenizer import Tokenizer

NUMBERS = ["2024-01-31", "3.14159 and 1000000", "½ ² Ⅳ ٣٤٥"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(default_model_path)


@pytest.fixture(scope="module")
def default_metadata(default_model_path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(default_model_path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def smollm2(default_metadata) -> Backend:
    """SmolLM2's tokenizer.json cuts text by Digits and ByteLevel; the rest of it is in the GGUF."""
    tokens = default_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in default_metadata["tokenizer.ggml.merges"]]
    reference = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference.decoder = decoders.ByteLevel()
    reference.add_special_tokens(tokens[:17])
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


def test_the_default_model_equals_transformers(default_tokenizer, default_model_path: Path) -> None:
    """Transformers leaves out this GGUF's rule for digits, so the texts have none."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    texts = [text for text in TEXTS if not any(character.isnumeric() for character in text)]
    assert len(texts) >= 5
    for text in texts:
        ids = default_tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert default_tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert default_tokenizer.eos_token_ids == (reference.eos_token_id,)
    assert default_tokenizer.bos_token_id == reference.bos_token_id
    assert default_tokenizer.chat_template == reference.chat_template


def test_the_default_model_adds_no_bos(default_tokenizer) -> None:
    assert not default_tokenizer.adds_bos
    assert default_tokenizer.encode("") == []
    assert default_tokenizer.special_token_strings["eos_token"] == "<|im_end|>"


def byte_level_metadata(backend: Backend, **changes: Any) -> dict[str, Any]:
    """A GGUF's metadata for a trained byte-level tokenizer; values of ``None`` are left out."""
    import json

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


@pytest.mark.parametrize(
    ("pre", "pattern", "nfc", "ignore_merges", "adds_bos"),
    [
        ("llama-bpe", LLAMA3, False, True, True),
        ("qwen2", QWEN2, True, False, False),
        ("tekken", TEKKEN, False, True, True),
    ],
)
def test_pre_tokenizers(byte_level_backend, pre, pattern, nfc, ignore_merges, adds_bos) -> None:
    tokenizer = build_tokenizer(byte_level_metadata(byte_level_backend, **{"tokenizer.ggml.pre": pre}))
    reference = Backend.from_str(byte_level_backend.to_str())
    reference.pre_tokenizer = split(pattern)
    reference.model.ignore_merges = ignore_merges
    if nfc:
        reference.normalizer = normalizers.NFC()
    cases = ["HTTPServer don't I'LL", "a/b//c\n/", "nai\u0308ve e\u0301", *TEXTS, *NUMBERS]
    for text in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text).ids
    assert tokenizer.adds_bos is adds_bos
    changed = byte_level_metadata(
        byte_level_backend, **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": not adds_bos}
    )
    assert build_tokenizer(changed).adds_bos is not adds_bos


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


def test_merges_from_scores_equal_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    pieces = ["a", "b", "c", "ab", "bc", "abc", "aa", "aaa", "aab", "cab", "abcab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    scores = dict(zip(pieces, [0, 0, 0, -1, -3, -2, -4, -5, -5, -6, -7], strict=True))
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
