"""Server-sent events: a response that streams ready-made frames.

Starlette's ``StreamingResponse`` and sse-starlette's ``EventSourceResponse`` do not fit: the first leaves its
iterator to the garbage collector when the client goes away while a chunk is sent, the second starts four
tasks a request and a cancel scope a chunk, and ends streams at SIGTERM by a patch of uvicorn. Here one task
sends and one listens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamllm.server.errors import body_of_failure
from streamllm.server.http_protocol import ABORT, PIECE
from streamllm.server.in_flight import (
    InFlight,
    RequestTimeoutError,
    ServerStoppingError,
    StalledReaderError,
)
from streamllm.server.request_context import current_request

logger = logging.getLogger("streamllm.server")

Write = Callable[[bytes], bool]
"""Writes a piece of an answer at once; ``False`` if it must be sent and waited for (a slow client)."""

DONE = b"data: [DONE]\n\n"
FAREWELL_TIMEOUT = 1.0
"""Seconds that a client gets to take the last event when its time is over."""


def frame(event: Any) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


def named_frame(name: str, event: Any) -> bytes:
    """One event with a name and a JSON payload."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(event))


def openai_farewell(error: Exception | None) -> bytes:
    """The last frames of a stream of chunks: what went wrong, if anything did, and ``[DONE]``."""
    return DONE if error is None else frame(body_of_failure(error)[1]) + DONE


class EventStream(Response):
    """Streams frames until they end, the client leaves or stops reading, or the time is over.

    A failure becomes an event of its own at the end. A client that does not read is cut off: its connection's
    buffers are full, so that nothing can be said to it.

    Args:
        frames: called with a :data:`Write` when the answer has begun; yields whole frames as bytes, and is
            closed in every case.
        release: called once at the end, whatever happened.
        farewell: what ended the frames, or ``None`` -> the last frames.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: Callable[[Write], AsyncGenerator[bytes, None]],
        *,
        in_flight: InFlight,
        release: Callable[[], None],
        farewell: Callable[[Exception | None], bytes] = openai_farewell,
    ) -> None:
        self._frames = frames
        self._farewell = farewell
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._in_flight = in_flight
        self._release = release
        self._started = False
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._in_flight.run(
                receive,
                self._send_frames(scope, send),
                admitted=True,
                sending_since=lambda: self._sending_since,
            )
        except ClientDisconnect:
            logger.debug("a client left its stream")
        except StalledReaderError:
            logger.warning("a client does not read its stream: cut off")
            await _cut_off(scope, receive)
        except (ServerStoppingError, RequestTimeoutError) as error:
            if not self._started:
                raise
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._send_end(send, self._farewell(error)), FAREWELL_TIMEOUT)
        finally:
            self._release()

    async def _send_frames(self, scope: Scope, send: Send) -> None:
        extension = scope.get("extensions", {}).get(PIECE)
        write_piece = _cannot if extension is None else extension["call"]
        context = current_request()

        def write(data: bytes) -> bool:
            if not write_piece(data):
                return False
            context.num_bytes_past_middleware += len(data)
            return True

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._started = True
        failure: Exception | None = None
        try:
            async with aclosing(self._frames(write)) as frames:
                async for data in frames:
                    if write(data):
                        continue
                    self._sending_since = time.monotonic()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    self._sending_since = None
        except Exception as error:
            failure = error
        await self._send_end(send, self._farewell(failure))

    @staticmethod
    async def _send_end(send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _cannot(data: bytes) -> bool:
    return False


async def _cut_off(scope: Scope, receive: Receive) -> None:
    extension = scope.get("extensions", {}).get(ABORT)
    if extension is not None:
        extension["call"]()
        while (await receive())["type"] != "http.disconnect":
            pass
