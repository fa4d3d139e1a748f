"""The form of ``POST /v1/files``, whose file goes to the disk as it comes."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from streamllm.errors import InvalidRequestError
from streamllm.server.batches.files import FORM_BYTES, NewFile
from streamllm.server.batches.protocol import FILE_PURPOSE, expiry_seconds

# It warns of each malformed form; the client is told.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)

PIECE = 2**18
"""Bytes that are parsed and written at a time, in a thread."""

MAX_FIELD = 4096
MAX_FILENAME = 255


@dataclass
class Form:
    """
    Attributes:
        fields: name -> text of the parts that are not files.
        filename: the file's own name; ``None`` if the form has no file.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None

    def expires_after(self) -> int | None:
        """Seconds that the file is to be kept, if the form says so.

        Raises:
            InvalidRequestError: it says so in a wrong way.
        """
        anchor, seconds = (self.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return None
        number = int(seconds) if seconds and re.fullmatch(r"\d{1,9}", seconds) else None
        return expiry_seconds("expires_after", anchor, number)

    def check(self) -> str:
        """The file's name in a form that may be stored.

        Raises:
            InvalidRequestError: something is missing or not allowed.
        """
        purpose = self.fields.get("purpose")
        if purpose is None:
            raise InvalidRequestError("purpose is required.", param="purpose")
        if purpose != FILE_PURPOSE:
            raise InvalidRequestError(
                f'purpose must be "{FILE_PURPOSE}", got "{purpose[:40]}": files are kept for batches only.',
                param="purpose",
            )
        if self.filename is None:
            raise InvalidRequestError("file is required.", param="file")
        return self.filename


def boundary_of(request: Request) -> bytes:
    """What separates the parts of a request's form.

    Raises:
        InvalidRequestError: (415) it is not a form with files.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequestError(
            "The body must be multipart/form-data with a boundary, with the fields purpose and file.",
            status=415,
        )
    return boundary


async def read_form(request: Request, boundary: bytes, file: NewFile) -> Form:
    """Read a form to its end.

    Args:
        file: takes the bytes of the part ``file``.

    Raises:
        InvalidRequestError: the form is malformed, or something in it is too large.
        ClientDisconnect: the client left.
    """
    reader = _FormReader(boundary, file)
    pieces, size = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        size += len(piece)
        if size >= PIECE:
            await asyncio.to_thread(reader.feed, b"".join(pieces))
            pieces, size = [], 0
    await asyncio.to_thread(reader.feed, b"".join(pieces))
    if not reader.has_ended:
        raise _malformed()
    return reader.form


class _FormReader:
    """Takes the parser's calls. Headers and values come in pieces."""

    def __init__(self, boundary: bytes, file: NewFile) -> None:
        self.form = Form()
        self.has_ended = False
        self._file = file
        self._num_other_bytes = 0
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._name = ""
        self._value = bytearray()
        self._in_file = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._add(self._header[0], data[start:end]),
                    "on_header_value": lambda data, start, end: self._add(self._header[1], data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise _malformed() from None

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError:
            raise _malformed() from None

    def _begin_part(self) -> None:
        self._disposition, self._name, self._in_file = b"", "", False
        self._value.clear()

    def _add(self, buffer: bytearray, data: bytes) -> None:
        self._num_other_bytes += len(data)
        if self._num_other_bytes > FORM_BYTES:
            raise InvalidRequestError("The form holds too much besides its file.", status=413)
        buffer += data

    def _end_header(self) -> None:
        name, value = (bytes(part) for part in self._header)
        if name.lower() == b"content-disposition":
            self._disposition = value
        for part in self._header:
            part.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        if b"name" not in options:
            raise _malformed()
        self._name = _text(options[b"name"])
        self._in_file = self._name == "file"
        if self._in_file:
            if self.form.filename is not None:
                raise InvalidRequestError("The form holds more than one file.", param="file")
            self.form.filename = _text(options.get(b"filename", b""))[:MAX_FILENAME] or "file"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file.write(data[start:end])
        else:
            self._add(self._value, data[start:end])

    def _end_part(self) -> None:
        if not self._in_file:
            self.form.fields[self._name] = _text(bytes(self._value[:MAX_FIELD]))

    def _end(self) -> None:
        self.has_ended = True


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("The body is not a valid multipart form, or not a whole one.")
