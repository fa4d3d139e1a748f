"""A SentencePiece model file (``tokenizer.model``), read without the sentencepiece package.

The file is one protocol buffer (https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto),
of which some fifteen fields say how text is cut. Reading them takes the few lines below; the protobuf package
would bring its runtime and a generated description of the whole file, which clashes with any other copy of it
in the same process, and the sentencepiece package a second tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamllm.errors import ModelLoadError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces; GGUF numbers them alike."""

_UNIGRAM, _BPE = 1, 2
_KINDS = {3: "word", 4: "char"}
# A protocol buffer's wire types.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """A vocabulary with scores, and how text is normalised before it is cut.

    Attributes:
        pieces: the tokens by id, a space written as ``▁``.
        scores: of each piece, higher is better: a rank (BPE) or a log-probability (unigram).
        types: of each piece, such as :data:`NORMAL`.
        is_unigram: cut by the best sum of scores; otherwise by merging the best-scored neighbours (BPE).
        byte_fallback: a character without a token becomes bytes such as ``<0xE2>``.
        unknown_id, bos_id, eos_id, pad_id: of the special pieces; negative where there is none.
        adds_space: a text gets a space in front.
        removes_extra_spaces: spaces at both ends go, runs of them become one.
        escapes_spaces: a space is written as ``▁``.
        charsmap: SentencePiece's compiled table of character replacements, empty for none.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    is_unigram: bool
    byte_fallback: bool
    unknown_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    adds_space: bool = True
    removes_extra_spaces: bool = True
    escapes_spaces: bool = True
    charsmap: bytes = b""


def read_model(path: Path) -> SentencePieceModel:
    """The model in a file.

    Raises:
        ModelLoadError: the file cannot be read, is damaged, or holds a model of another kind than BPE and
            unigram, by name.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        return _parse_model(data)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except (IndexError, struct.error, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{path} is damaged, cut short or no SentencePiece model ({error}). Fetch the file again."
        ) from error


def _parse_model(data: bytes) -> SentencePieceModel:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] | None = None
    normalizer: dict[int, int | bytes] | None = None
    for number, value in _fields(data):
        if number == 1:
            piece, score, kind = _parse_piece(value)
            pieces.append(piece)
            scores.append(score)
            types.append(kind)
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces or trainer is None or normalizer is None:
        raise ValueError("parts of it are missing")
    kind = _integer(trainer, 3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ModelLoadError(
            f"SentencePiece models of the kind {_KINDS.get(kind, kind)!r} are not supported; supported: "
            "BPE and unigram."
        )
    if _integer(trainer, 24, 0):
        raise ModelLoadError("SentencePiece models that put the space behind a word are not supported.")
    special = [_integer(trainer, 40 + index, default) for index, default in enumerate((0, 1, 2, -1))]
    if max(special) >= len(pieces):
        raise ValueError(f"special id {max(special)} of {len(pieces)} pieces")
    unknown_id, bos_id, eos_id, pad_id = special
    charsmap = normalizer.get(2, b"")
    if not isinstance(charsmap, bytes):
        raise ValueError("charsmap")
    return SentencePieceModel(
        pieces,
        scores,
        types,
        is_unigram=kind == _UNIGRAM,
        byte_fallback=bool(_integer(trainer, 35, 0)),
        unknown_id=unknown_id,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        adds_space=bool(_integer(normalizer, 3, 1)),
        removes_extra_spaces=bool(_integer(normalizer, 4, 1)),
        escapes_spaces=bool(_integer(normalizer, 5, 1)),
        charsmap=charsmap,
    )


def _parse_piece(data: int | bytes) -> tuple[str, float, int]:
    """Text, score and type of one piece."""
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _integer(fields: dict[int, int | bytes], number: int, default: int) -> int:
    """A field of type int32, enum or bool; negative numbers are written as 64 bits."""
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number}")
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an integer, or bytes for everything else.

    Raises:
        ValueError, IndexError: not a message.
    """
    if not isinstance(data, bytes):
        raise ValueError("a number in place of a message")
    offset, end = 0, len(data)
    while offset < end:
        tag, offset = _varint(data, offset)
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, offset = _varint(data, offset)
            yield tag >> 3, value
            continue
        if wire_type == _LENGTH:
            length, offset = _varint(data, offset)
        elif wire_type == _FIXED32:
            length = 4
        elif wire_type == _FIXED64:
            length = 8
        else:
            raise ValueError(f"wire type {wire_type}")
        start, offset = offset, offset + length
        if offset > end:
            raise IndexError("end of file")
        yield tag >> 3, data[start:offset]


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """An integer written in groups of seven bits, and the offset behind it."""
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
