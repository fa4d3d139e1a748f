"""uvicorn's HTTP connection, with limits on what a client may send and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from streamllm.server.errors import error_body

ABORT = "streamllm.abort"
"""ASGI extension: a callable that drops the connection, and what is still to be written, at once."""

PIECE = "streamllm.piece"
"""ASGI extension: :meth:`HttpProtocol.write_piece`."""

MESSAGE_TIMEOUT = 60.0
"""Seconds for a request's headers to come whole, and for each further piece of its body."""


_UPGRADE = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)


def http_protocol(max_header_bytes: int, max_headers: int) -> type[HttpProtocol]:
    """The protocol class with its limits.

    Args:
        max_header_bytes: request line and headers together (give or take what one read from the socket
        brings).
        max_headers: header lines.
    """
    limits = {"max_header_bytes": max_header_bytes, "max_headers": max_headers}
    return type("LimitedHttpProtocol", (HttpProtocol,), limits)


class HttpProtocol(HttpToolsProtocol):
    """One connection. httptools bounds nothing: neither headers nor the time in which they come."""

    max_header_bytes: int
    max_headers: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = self._in_message = False
        self._head_bytes = self._num_headers = 0
        self._last_data = 0.0
        self._message_timer: asyncio.TimerHandle | None = None
        self._refusal = (400, "Invalid HTTP request.")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn waits for ever for the first request of a connection.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._message_timer is not None:
            self._message_timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._last_data = time.monotonic()
        if self._in_head or not self._in_message:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes:
                self._refuse_headers()
                self.send_400_response("")
        if self._in_message and self._message_timer is None:
            self._message_timer = self.loop.call_later(MESSAGE_TIMEOUT, self._check_message)

    def _check_message(self) -> None:
        self._message_timer = None
        if not self._in_message or self.transport.is_closing():
            return
        waiting = time.monotonic() - self._last_data
        if not self._in_head and waiting < MESSAGE_TIMEOUT:
            self._message_timer = self.loop.call_later(MESSAGE_TIMEOUT - waiting, self._check_message)
            return
        self._refusal = (408, f"The request did not come whole within {MESSAGE_TIMEOUT:g} s.")
        self.send_400_response("")

    def write_piece(self, data: bytes) -> bool:
        """Write a piece of the answer that is under way, without the way through the middleware, which costs
        as much as all else that is done for a token.

        Returns ``False`` if it must be sent that way: the client is slow, or knows no chunks.
        """
        cycle = self.cycle
        if self.flow.write_paused or not cycle.chunked_encoding:
            return False
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    # -- parser callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {
            ABORT: {"call": self.transport.abort},
            PIECE: {"call": self.write_piece},
        }
        self._in_head = self._in_message = True
        self._head_bytes = self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come here too.
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    # -- refusals ------------------------------------------------------------------------------------------

    def _count_head(self, length: int) -> None:
        self._head_bytes += length
        if self._head_bytes > self.max_header_bytes or self._num_headers > self.max_headers:
            self._refuse_headers()
            raise httptools.HttpParserError("too many headers")

    def _refuse_headers(self) -> None:
        self._refusal = (
            431,
            f"The request's headers are too large: at most {self.max_headers} of together "
            f"{self.max_header_bytes} bytes are allowed.",
        )

    def send_400_response(self, msg: str) -> None:
        """uvicorn's hook for a request that is not HTTP; here for every refusal ahead of the application."""
        status, message = self._refusal
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            # An answer is on its way: nothing can be said in the middle of it.
            self.transport.abort()
            return
        if self.transport.is_closing():
            return
        body = orjson.dumps(error_body(message, status=status))
        head = STATUS_LINE[status] + (
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Hide an ``Upgrade`` header. A server need not follow it, but httptools then drops the request's body;
    Java's HTTP client sends one with every request."""
    end = data.find(b"\r\n\r\n")
    head, rest = (data, b"") if end < 0 else (data[:end], data[end:])
    return _UPGRADE.sub(b"\r\nx-upgrade", head) + rest if b"pgrade" in head.lower() else data
