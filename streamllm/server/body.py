"""Reading request bodies: how large, and how costly to decode, they may be."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from streamllm.errors import InvalidRequestError
from streamllm.server.protocol import decode_body

Body = TypeVar("Body", bound=msgspec.Struct)

LARGE = 2**20
"""Bytes from which a body is measured before it is decoded, and decoded in a thread."""

MAX_COST = 4_000_000
"""What a large body may cost to decode: one a value of a list, eight a list or object. The decoder holds the
interpreter's lock, so that this is a gap in every stream: 0.1 s at most."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidRequestError: (413) it is larger than ``max_bytes``: said before it is read where its length
            was announced.
        ClientDisconnect: the client left while sending.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(f"at most {max_bytes} bytes are allowed")
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise _too_large(f"at most {max_bytes} bytes are allowed")
        pieces.append(piece)
    return b"".join(pieces)


async def decoded(body: bytes, body_type: type[Body]) -> Body:
    """:func:`decode_body`, in a thread if the body is large.

    Raises:
        InvalidRequestError: (413) a large body holds too many values; and what :func:`decode_body` raises.
    """
    if len(body) < LARGE:
        return decode_body(body, body_type)
    return await asyncio.to_thread(_measured, body, body_type)


def _measured(body: bytes, body_type: type[Body]) -> Body:
    cost = body.count(b",") + 8 * (body.count(b"[") + body.count(b"{"))
    if cost > MAX_COST:
        raise _too_large("it holds too many values for one request")
    return decode_body(body, body_type)


def _too_large(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body is too large: {why}.", code="request_too_large", status=413)
