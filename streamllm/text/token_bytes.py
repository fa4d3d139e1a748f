"""From a vocabulary's spelling of a token to the bytes that it stands for.

Two spellings cover the models served here. Byte-level BPE (GPT-2) writes every byte as one printable
character, a space as ``Ġ``. SentencePiece writes a space as ``▁`` and a byte that has no token as ``<0xE2>``.
Which one a tokenizer uses is read from its decoder.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamllm.errors import ModelLoadError

SENTENCEPIECE_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, inverted: character to byte value (256 entries).

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in
    order (``bytes_to_unicode`` in https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(list(others))})
    return alphabet


@dataclass(frozen=True)
class TokenSpelling:
    """How a vocabulary spells bytes.

    Attributes:
        byte_level: tokens are written in :func:`byte_alphabet`.
        replacements: (spelling, text) pairs applied to each token, such as ``("▁", " ")``.
        byte_fallback: ``<0xE2>`` is one byte.
        leading_spaces: spaces that the tokenizer puts in front of a text, to be taken off when a whole text
            is decoded.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    leading_spaces: int = 0

    @classmethod
    def from_decoder(cls, decoder: Mapping[str, Any] | None) -> TokenSpelling:
        """Reads the ``decoder`` of a tokenizer.json.

        Raises:
            ModelLoadError: a decoder that does not map each token to bytes by itself, named.
        """
        if decoder is None:
            raise ModelLoadError(
                "The tokenizer has no decoder, so that its tokens cannot be turned into text."
            )
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        byte_level = byte_fallback = False
        replacements: list[tuple[str, str]] = []
        leading_spaces = 0
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": spelling}, "content": text}:
                    replacements.append((spelling, text))
                case {"type": "Metaspace", "replacement": spelling}:
                    replacements.append((spelling, " "))
                    leading_spaces = 0 if step.get("prepend_scheme") == "never" else 1
                case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                    leading_spaces = start
                case _:
                    raise ModelLoadError(
                        f"The tokenizer's decoder {step['type']} is not supported; supported are byte-level "
                        "BPE and SentencePiece (Replace, ByteFallback, Fuse, Strip on the left, Metaspace)."
                    )
        if byte_level and (replacements or byte_fallback):
            raise ModelLoadError(
                "The tokenizer's decoder mixes ByteLevel with SentencePiece steps: not supported."
            )
        return cls(byte_level, tuple(replacements), byte_fallback, leading_spaces)

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary, given its spelling."""
        if self.byte_level:
            alphabet = byte_alphabet()
            try:
                return bytes([alphabet[character] for character in token])
            except KeyError:
                # Not written in the alphabet, hence plain text, as the tokenizers package reads it too.
                return token.encode()
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for spelling, text in self.replacements:
            token = token.replace(spelling, text)
        return token.encode()

    def added_token_bytes(self, token: str) -> bytes:
        """The bytes of a token added beside the vocabulary, which is matched in the text as it stands.

        SentencePiece conversions list runs of ``▁`` among them, and mean spaces.
        """
        return token.encode() if self.byte_level else self.token_bytes(token)
