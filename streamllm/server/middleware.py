"""Middleware, outermost first: CORS, request ids, unexpected errors, API keys.

CORS is outermost so that refusals and failures carry its headers too and a preflight needs no key.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamllm.server.errors import error_response, failure_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Paths that need no API key; every other path does, also one that does not exist."""

MAX_REQUEST_ID_LENGTH = 128


class CORS(CORSMiddleware):
    """Starlette's, with refused preflights in OpenAI's error shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        headers = {
            name: value
            for name, value in response.headers.items()
            if name not in ("content-length", "content-type")
        }
        return error_response(bytes(response.body).decode() + ".", status=400, headers=headers)


class RequestIds:
    """Echoes ``X-Request-Id``, or makes one. Only the header: inside, requests have ids of their own."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        printable = "".join(character for character in given if "!" <= character <= "~")
        request_id = printable[:MAX_REQUEST_ID_LENGTH] or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class UnexpectedErrors:
    """Answers 500 for an error that nobody foresaw; Starlette's own would do so outside of CORS."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            await failure_response(error)(scope, receive, send)


class ApiKeys:
    """Lets only requests with one of the keys through (``Authorization: Bearer KEY``)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        response = error_response(
            "A valid API key is required: send the header Authorization: Bearer KEY.",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path in OPEN_PATHS or scope["method"] == "OPTIONS"

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = hashlib.sha256(key).digest()
        # Digests of equal length, all compared: time tells neither a key's length nor which one came close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
