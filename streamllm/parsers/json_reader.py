"""JSON read as it arrives."""

from __future__ import annotations

import json
import re

from streamllm.parsers.text_reader import WHITESPACE, Emit, Steps, TextReader

_PLAIN_IN_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])+')
_BETWEEN_STRINGS = re.compile(r"[\s,:0-9A-Za-z+\-.]+")
"""What may stand outside of strings besides brackets: anything else ends the value. ``True`` and the like
pass, since a client that repairs JSON knows what to do with them."""

_CLOSES = {"]": "[", "}": "{"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotJsonError(Exception):
    """The text is not what was asked for."""


def dump_json(value: object) -> str:
    """A value as JSON text that UTF-8 can hold: lone surrogates stay escaped.

    Raises:
        ValueError, TypeError, RecursionError: JSON cannot hold it.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return dump_json(text)[1:-1]


def read_string(reader: TextReader) -> Steps[str]:
    """A JSON string, decoded.

    Raises:
        NotJsonError: something else comes, or an escape that JSON does not know.
        EndOfOutput: the text ends first.
    """
    if (yield from reader.peek()) != '"':
        raise NotJsonError
    pieces: list[str] = []
    yield from _copy_string(reader, pieces.append)
    try:
        value = json.loads("".join(pieces))
    except ValueError:
        raise NotJsonError from None
    assert isinstance(value, str)
    return value


def copy_value(reader: TextReader, emit: Emit) -> Steps[bool]:
    """Emit the text of one JSON value as it arrives.

    An object or array is followed by its brackets alone, so what stands between them may be invalid; control
    characters inside of strings, which models write and JSON forbids, are escaped.

    Returns:
        Whether it came to its end; otherwise what follows can be no part of it.

    Raises:
        NotJsonError: no value begins here.
        EndOfOutput: the text ends first.
    """
    first = yield from reader.peek()
    if first == '"':
        yield from _copy_string(reader, emit)
        return True
    if first not in "[{":
        word = yield from reader.word(re.compile(r"[\w+\-.]+"))
        if not word:
            raise NotJsonError
        emit(word)
        return True
    opened: list[str] = []
    while True:
        yield from reader.run(_BETWEEN_STRINGS, emit)
        character = yield from reader.peek()
        if character == '"':
            yield from _copy_string(reader, emit)
            continue
        if character in "[{":
            opened.append(character)
        elif opened[-1] == _CLOSES.get(character):
            opened.pop()
        else:
            return False
        emit(reader.take(1))
        if not opened:
            return True


def _copy_string(reader: TextReader, emit: Emit) -> Steps[None]:
    emit(reader.take(1))
    while True:
        yield from reader.run(_PLAIN_IN_STRING, emit)
        character = yield from reader.peek()
        reader.take(1)
        if character == "\\":
            escaped = yield from reader.peek()
            reader.take(1)
            emit(character + (escaped if escaped >= " " else escape(escaped)[1:]))
        else:
            emit(character if character >= " " else escape(character))
            if character == '"':
                return


def skip_whitespace(reader: TextReader) -> Steps[None]:
    """Read whitespace up to what follows it, or to the text's end."""
    yield from reader.run(WHITESPACE)
