"""Reading request bodies."""

from __future__ import annotations

from starlette.requests import Request

from streamllm.errors import InvalidRequestError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidRequestError: (413) it is larger than ``max_bytes``: said before it is read where its length
            was announced.
        ClientDisconnect: the client left while sending.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body is too large; at most {max_bytes} bytes are allowed.",
        code="request_too_large",
        status=413,
    )
