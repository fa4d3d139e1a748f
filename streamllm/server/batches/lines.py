"""The lines of an input file: reading them a few at a time, and what a line must be."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamllm.errors import InvalidRequestError, StreamLLMError
from streamllm.server.batches.protocol import ENDPOINTS
from streamllm.server.protocol import decode_body

LINES_AT_A_TIME = 128
BYTES_AT_A_TIME = 2**20

MAX_LINES = 1_000_000
"""Lines of one file (OpenAI takes 50,000): sixteen bytes of each are remembered while it is checked."""

MAX_ERRORS = 100
"""Errors of one file that are listed."""

MAX_CUSTOM_ID = 512
ENVELOPE_BYTES = 2**14
"""What a line may have around its body."""


class LineError(StreamLLMError):
    """A line, or a file, that cannot be worked on.

    Attributes:
        code: machine-readable.
        line: its number; ``None`` for the whole file.
        param: the field that is wrong.
    """

    def __init__(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.line = line
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": str(self), "param": self.param}


@dataclass(frozen=True, slots=True)
class InputLine:
    """
    Attributes:
        number: from 1.
        data: ``None`` if the line is longer than a line may be.
    """

    number: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks.

    Attributes:
        number: the line's, from 1.
        body: of the request to ``url``, a JSON object.
    """

    number: int
    custom_id: str
    url: str
    body: bytes


class LineReader:
    """Reads a file's lines in order, blank ones left out. Every method blocks.

    Args:
        max_body_bytes: largest body of a line.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, max_body_bytes: int) -> None:
        self._file = path.open("rb")
        self._max_bytes = max_body_bytes + ENVELOPE_BYTES
        self._number = 0

    def read(self) -> list[InputLine]:
        """The next lines, a megabyte or so; none at the end."""
        lines: list[InputLine] = []
        size = 0
        while len(lines) < LINES_AT_A_TIME and size < BYTES_AT_A_TIME:
            data = self._file.readline(self._max_bytes + 1)
            if not data:
                break
            self._number += 1
            size += len(data)
            if self._number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if len(data) > self._max_bytes:
                self._skip_rest(data)
                lines.append(InputLine(self._number, None))
            elif data.strip():
                lines.append(InputLine(self._number, data))
        return lines

    @property
    def position(self) -> int:
        """Bytes of the file that have been read."""
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def _skip_rest(self, data: bytes) -> None:
        while data and not data.endswith(b"\n"):
            data = self._file.readline(2**20)


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _DecodedLine(msgspec.Struct):
    """The same, for what :func:`decode_body` says about a wrong one."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


def read_line(line: InputLine, endpoint: str | None = None) -> LineRequest:
    """What a line asks.

    Args:
        endpoint: which it must ask; ``None`` for any.

    Raises:
        LineError: it is malformed, or asks something else.
    """
    number = line.number
    if line.data is None:
        raise LineError("line_too_long", "The line is longer than --max-body-bytes allows.", number)
    try:
        decoded = msgspec.json.decode(line.data, type=_Line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise _explained(line.data, number) from None
    if not 0 < len(decoded.custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            "invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", number, "custom_id"
        )
    if decoded.method != "POST":
        shown = decoded.method[:20]
        raise LineError("invalid_method", f'method must be "POST", got "{shown}".', number, "method")
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if decoded.url not in allowed:
        shown = decoded.url[:100]
        wanted = "the batch's endpoint" if endpoint else "one of"
        raise LineError(
            "mismatched_url", f'url must be {wanted} {", ".join(allowed)}, got "{shown}".', number, "url"
        )
    body = bytes(decoded.body)
    if not body.startswith(b"{"):
        raise _explained(line.data, number)
    return LineRequest(number, decoded.custom_id, decoded.url, body)


def _explained(data: bytes, number: int) -> LineError:
    try:
        decode_body(data, _DecodedLine)
    except InvalidRequestError as error:
        message = error.message.replace("The body", "The line", 1)
        code = "invalid_json_line" if error.param is None else "invalid_line"
        return LineError(code, message, number, error.param)
    return LineError("invalid_json_line", "The line is not valid JSON.", number)


class FileCheck:
    """Reads a whole file once and says what is wrong with its lines, in memory of sixteen bytes a line.

    Args:
        endpoint: which all lines must ask; ``None`` for any.

    Attributes:
        num_lines: lines that are not blank.
        num_errors: how much is wrong.
        errors: what is wrong, the first :data:`MAX_ERRORS`.
        duplicates: numbers of lines whose ``custom_id`` an earlier line has.
    """

    def __init__(self, path: Path, endpoint: str | None, max_body_bytes: int) -> None:
        self.num_lines = self.num_errors = 0
        self.errors: list[LineError] = []
        self.duplicates: frozenset[int] = frozenset()
        self._endpoint = endpoint
        self._reader = LineReader(path, max_body_bytes)
        self._numbers = array("Q")
        self._digests = array("Q")
        # Nobody can write ids whose digests meet.
        self._key = os.urandom(16)

    def advance(self) -> bool:
        """Check the next lines (blocks); returns whether there are more."""
        lines = self._reader.read()
        for line in lines:
            self.num_lines += 1
            try:
                request = read_line(line, self._endpoint)
            except LineError as error:
                self._add(error)
                continue
            self._numbers.append(line.number)
            self._digests.append(self._digest(request.custom_id))
        if lines and self.num_lines <= MAX_LINES:
            return True
        self._end()
        return False

    def close(self) -> None:
        self._reader.close()

    def _digest(self, custom_id: str) -> int:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little")

    def _add(self, error: LineError) -> None:
        self.num_errors += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)

    def _end(self) -> None:
        if not self.num_lines:
            self._add(LineError("empty_file", "The file holds no request."))
        if self.num_lines > MAX_LINES:
            self._add(LineError("too_many_lines", f"The file holds more than {MAX_LINES:,} requests."))
        pairs = duplicates(self._numbers, self._digests)
        self.duplicates = frozenset(second for _, second in pairs)
        for first, second in pairs:
            message = f"custom_id is that of line {first} already; each line needs one of its own."
            self._add(LineError("duplicate_custom_id", message, second, "custom_id"))
        self.errors.sort(key=lambda error: error.line or 0)


def duplicates(numbers: Sequence[int], digests: Sequence[int]) -> list[tuple[int, int]]:
    """(first line, later line) for each line whose digest an earlier one has, by the later line."""
    found = np.asarray(digests, dtype=np.uint64)
    order = np.argsort(found, kind="stable")
    ordered = found[order]
    pairs = []
    for place in np.flatnonzero(ordered[1:] == ordered[:-1]) + 1:
        first = int(np.searchsorted(ordered, ordered[place]))
        pairs.append((numbers[order[first]], numbers[order[place]]))
    return sorted(pairs, key=lambda pair: pair[1])
