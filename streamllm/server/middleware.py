"""Middleware, outermost first: request ids, access log, CORS, unexpected errors, API keys.

CORS is outside of what refuses and fails, so that refusals and failures carry its headers too and a preflight
needs no key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import uuid
from collections.abc import Callable, Iterable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamllm.server.errors import ANTHROPIC_PATHS, error_response, failure_response
from streamllm.server.request_context import RequestContext, enter_request

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version"})
"""Paths that need no API key; every other path does, also one that does not exist."""

ADMIN_PATHS = frozenset(
    {"/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/debug/perfetto"}
)
"""Paths that change the server's state for everybody, or show everybody's requests in detail."""

MAX_REQUEST_ID_LENGTH = 128

TRACE_HEADERS = ("traceparent", "tracestate")
"""Where a client says to which trace its request belongs (W3C Trace Context)."""

_LOOPBACK_ONLY = (
    "is open to the loopback interface only; start the server with --admin-api-key to use it from elsewhere."
)


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
    """Echoes ``X-Request-Id``, or makes one, and enters the request's context. Only the header and the log:
    inside, requests have ids of their own.

    Args:
        on_streams: called when it is known which of the engine's requests answer one.
    """

    def __init__(self, app: ASGIApp, on_streams: Callable[[RequestContext], None] | None = None) -> None:
        self.app = app
        self._on_streams = on_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given_headers = Headers(scope=scope)
        given = given_headers.get("x-request-id", "")
        traces = {name: given_headers[name] for name in TRACE_HEADERS if name in given_headers}
        printable = "".join(character for character in given if "!" <= character <= "~")
        request_id = printable[:MAX_REQUEST_ID_LENGTH] or uuid.uuid4().hex
        path = _path(scope)
        context = RequestContext(request_id, path, trace_headers=traces, on_streams=self._on_streams)
        enter_request(context)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if path.startswith(ANTHROPIC_PATHS):
                    headers["request-id"] = request_id  # the name that Anthropic's clients read
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
    """Lets only requests with a key through (``Authorization: Bearer KEY``, or ``X-Api-Key: KEY`` as
    Anthropic's clients send it).

    Args:
        keys: open every route, but those of :data:`ADMIN_PATHS` where there are admin keys.
        admin_keys: open every route. Without any key at all, :data:`ADMIN_PATHS` are open to the loopback
            interface only (behind a proxy: to the client that it names in ``X-Forwarded-For``).
        open_paths: need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        self.app = app
        self._keys = _digests(keys)
        self._admin_keys = _digests(admin_keys)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            refusal = self._refusal(scope)
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path = _path(scope)
        if path in self._open_paths:
            return None
        given = given_key(scope)
        # All are compared, whichever matches: time tells nothing.
        is_admin, has_key = _matches(given, self._admin_keys), _matches(given, self._keys)
        if is_admin:
            return None
        if path in ADMIN_PATHS and self._admin_keys:
            return _forbidden(f"{path} needs an admin API key.") if has_key else _unauthorized()
        if path in ADMIN_PATHS and not self._keys and not _is_loopback(scope):
            return _forbidden(f"{path} {_LOOPBACK_ONLY}")
        return _unauthorized() if self._keys and not has_key else None


def _path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def given_key(scope: Scope) -> bytes | None:
    """The key that a request brings, if it brings one and no more."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(given) + len(keys) != 1:
        return None
    if keys:
        return keys[0]
    scheme, _, key = given[0].partition(b" ")
    return key if scheme.lower() == b"bearer" else None


def _matches(given: bytes | None, digests: Sequence[bytes]) -> bool:
    """Whether a key is among those known. Bytes are compared, so that any character may stand in a key, and
    digests of equal length, so that time tells neither a key's length nor which one came close."""
    digest = hashlib.sha256(given or b"").digest()
    matches = [hmac.compare_digest(digest, known) for known in digests]
    return given is not None and any(matches)


def _is_loopback(scope: Scope) -> bool:
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _unauthorized() -> Response:
    return error_response(
        "A valid API key is required: send the header Authorization: Bearer KEY, or X-Api-Key: KEY.",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _forbidden(message: str) -> Response:
    return error_response(message, status=403, code="insufficient_permissions")
