from __future__ import annotations

import pytest
from tokenizers import decoders, pre_tokenizers

from streamllm.errors import ModelLoadError
from streamllm.text.token_bytes import TokenSpelling, byte_alphabet


def test_the_alphabet_is_the_tokenizers_packages() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    spelled = {byte: character for character, byte in byte_alphabet().items()}
    text = "žluť 漢😀 \n"
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert piece == "".join(spelled[byte] for byte in text.encode())


def test_byte_level_tokens() -> None:
    spelling = TokenSpelling.from_decoder({"type": "ByteLevel"})
    assert spelling.token_bytes("Ġhello") == b" hello"
    assert spelling.token_bytes("ðŁĺ") == b"\xf0\x9f\x98"
    assert spelling.token_bytes("<漢字>") == "<漢字>".encode(), "not in the alphabet: text as it stands"
    assert spelling.leading_spaces == 0


def test_sentencepiece_tokens_decode_as_in_the_tokenizers_package() -> None:
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    spelling = TokenSpelling.from_decoder({"type": "Sequence", "decoders": steps})
    tokens = ["▁Hello", "▁▁", "<0xE4>", "<0xBD>", "<0xA0>", "<0x0A>", "<0xZZ>", "<0x41>B"]
    text = b"".join(map(spelling.token_bytes, tokens)).decode()
    reference = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert text.removeprefix(" ") == reference.decode(tokens)
    assert spelling.leading_spaces == 1


def test_metaspace_tokens() -> None:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    spelling = TokenSpelling.from_decoder(decoder)
    assert spelling.token_bytes("▁a▁b") == b" a b"
    assert spelling.token_bytes("<0x41>") == b"<0x41>", "no byte fallback here"
    assert spelling.leading_spaces == 1
    assert TokenSpelling.from_decoder({**decoder, "prepend_scheme": "never"}).leading_spaces == 0


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (None, "no decoder"),
        ({"type": "CTC"}, "CTC"),
        ({"type": "Strip", "content": "x", "start": 1, "stop": 0}, "Strip"),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "ByteFallback"}]}, "mixes"),
    ],
)
def test_decoders_that_are_not_token_by_token_are_refused(decoder, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        TokenSpelling.from_decoder(decoder)
