"""A lean httpx transport: what httpx and httpcore spend on every received chunk (several times what parsing a
token's event costs) would be taken from the server that shares the machine.

HTTP/1.1 without TLS over asyncio, parsed by httptools, connections kept alive. For ``http://`` only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

import httptools
import httpx

MOST_UNREAD_BYTES = 1 << 20
"""Of an answer whose reader is slower than the network; then the server is not read either."""


class LeanTransport(httpx.AsyncBaseTransport):
    """Sends requests over connections of its own, as many as are under way at once.

    Raises (as httpx's own transport):
        httpx.ConnectError: nobody listens.
        httpx.ConnectTimeout, httpx.ReadTimeout: the connection, or the answer's head, does not come in time.
            The body's time is the caller's to limit.
        httpx.ReadError, httpx.RemoteProtocolError: the connection broke; the answer is no HTTP.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions.get("timeout", {})
        key = (request.url.host, request.url.port or 80)
        try:
            connection = await self._exchange(key, request, timeouts)
        except asyncio.TimeoutError:
            raise httpx.ReadTimeout("the answer's head did not come in time", request=request) from None
        stream = _Body(connection, self._idle.setdefault(key, deque()))
        return httpx.Response(connection.status, headers=connection.headers, stream=stream)

    async def _exchange(
        self, key: tuple[str, int], request: httpx.Request, timeouts: dict[str, float | None]
    ) -> _Connection:
        """Sends a request; gives the connection on which the head of its answer has come."""
        if not isinstance(request.stream, httpx.ByteStream):
            return await self._upload(key, request, timeouts)
        message = _head(request) + await request.aread()
        while True:
            connection = self._take_idle(key)
            is_reused = connection is not None
            if connection is None:
                connection = await _connect(key, timeouts.get("connect"))
            try:
                connection.send(message)
                await asyncio.wait_for(connection.head_received(), timeouts.get("read"))
                return connection
            except httpx.ReadError:
                # The server may have closed an idle connection just when it was taken; then it has seen
                # nothing of the request.
                if not is_reused or connection.has_answered:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _upload(
        self, key: tuple[str, int], request: httpx.Request, timeouts: dict[str, float | None]
    ) -> _Connection:
        """As :meth:`_exchange`, for a body that comes piece by piece and only once."""
        assert isinstance(request.stream, httpx.AsyncByteStream)
        connection = await _connect(key, timeouts.get("connect"))
        is_chunked = "content-length" not in request.headers
        try:
            connection.send(_head(request))
            async for piece in request.stream:
                if connection.has_answered or connection.lost:
                    break  # a refusal: the rest interests nobody
                if piece:
                    connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
                    await connection.writable.wait()
            else:
                if is_chunked:
                    connection.write(b"0\r\n\r\n")
            await asyncio.wait_for(connection.head_received(), timeouts.get("read"))
            return connection
        except BaseException:
            connection.close()
            raise

    def _take_idle(self, key: tuple[str, int]) -> _Connection | None:
        idle = self._idle.get(key)
        while idle:
            connection = idle.pop()
            if not connection.lost:
                return connection
        return None

    async def aclose(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()


async def _connect(key: tuple[str, int], timeout: float | None) -> _Connection:
    loop = asyncio.get_running_loop()
    try:
        _, connection = await asyncio.wait_for(loop.create_connection(_Connection, *key), timeout)
    except asyncio.TimeoutError:
        raise httpx.ConnectTimeout(f"no connection to {key[0]}:{key[1]} within {timeout:g} s") from None
    except OSError as error:
        raise httpx.ConnectError(str(error)) from error
    return connection


def _head(request: httpx.Request) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % (name, value) for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection: sends a request, collects the answer's chunks until its reader takes them."""

    def __init__(self) -> None:
        self.lost = False
        self.writable = asyncio.Event()
        self.writable.set()
        self._begin()

    def _begin(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0
        self.keeps_alive = False
        self.complete = False
        self.chunks: list[bytes] = []
        self._num_unread = 0
        self._is_paused = False
        self.has_answered = False
        self._has_head = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def send(self, data: bytes) -> None:
        self._begin()
        self._transport.write(data)

    def write(self, data: bytes) -> None:
        """More of the request; wait for ``writable`` after it."""
        self._transport.write(data)

    def take(self) -> bytes:
        """What has come of the body since the last time."""
        data = b"".join(self.chunks)
        self.chunks.clear()
        self._num_unread = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        self._transport.abort()

    async def head_received(self) -> None:
        while not self._has_head:
            await self.news()

    async def news(self) -> None:
        """Waits until something has come since the last look. Raises what ended the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = httpx.RemoteProtocolError(str(error))
            self._transport.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.writable.set()
        framed = {name.lower() for name, _ in self.headers} & {b"content-length", b"transfer-encoding"}
        if exc is None and self._has_head and not framed:  # the end of the connection ends the body
            self.complete = True
        if not self.complete and self._error is None:
            self._error = httpx.ReadError(str(exc or "the server closed the connection"))
        self._wake()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    # -- httptools -----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keeps_alive = self._parser.should_keep_alive()
        self._has_head = self.status >= 200

    def on_body(self, data: bytes) -> None:
        self.chunks.append(data)
        self._num_unread += len(data)
        if self._num_unread > MOST_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.complete = self._has_head
        if not self._has_head:  # 100 Continue and its like
            self.headers = []


class _Body(httpx.AsyncByteStream):
    """An answer's body; its connection goes back to ``idle`` once it is read to the end."""

    def __init__(self, connection: _Connection, idle: deque[_Connection]) -> None:
        self._connection = connection
        self._idle = idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        while True:
            if connection.chunks:
                yield connection.take()
            elif connection.complete:
                return
            else:
                await connection.news()

    async def aclose(self) -> None:
        connection = self._connection
        if connection.complete and connection.keeps_alive and not connection.lost:
            if connection not in self._idle:
                self._idle.append(connection)
        else:
            connection.close()
