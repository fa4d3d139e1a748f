"""Errors in the shape of the API that was asked.

OpenAI's: ``{"error": {"message", "type", "param", "code"}}``; on the paths of Anthropic's API
``{"type": "error", "error": {"type", "message"}, "request_id"}``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from streamllm.errors import EngineDeadError, InvalidRequestError, QueueFullError, StreamLLMError
from streamllm.server.in_flight import RequestTimeoutError, ServerStoppingError
from streamllm.server.request_context import current_request

logger = logging.getLogger("streamllm.server")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left before its answer; nobody reads it but the log."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}
"""Types of errors whose status says more than whose fault it is."""

ANTHROPIC_PATHS = ("/v1/messages",)
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""https://docs.anthropic.com/en/api/errors"""


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error; its type follows from the HTTP status."""
    context = current_request()
    if context.path.startswith(ANTHROPIC_PATHS):
        if param is not None and param not in message:
            message = f"{param}: {message}"
        error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}
        return {"type": "error", "error": error, "request_id": context.request_id}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    *,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = orjson.dumps(error_body(message, status=status, param=param, code=code))
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def body_of_failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of whatever ended a request. What is not meant for users is logged, not shown."""
    if isinstance(error, InvalidRequestError):
        return error.status, error_body(
            error.message, status=error.status, param=error.param, code=error.code
        )
    if isinstance(error, StreamLLMError):
        status = 503 if isinstance(error, EngineDeadError) else 500
        code = None
        if isinstance(error, RequestTimeoutError):
            status, code = 504, "request_timeout"
        return status, error_body(str(error), status=status, code=code)
    logger.error("a request failed", exc_info=error)
    return 500, error_body("The server failed to process the request.", status=500)


def failure_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    status, body = body_of_failure(error)
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")


async def on_streamllm_error(request: Request, error: Exception) -> Response:
    """What streamllm raises on purpose; what may be tried again later says when."""
    server = request.app.state.server
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(server.retry_after())
    elif isinstance(error, ServerStoppingError):
        headers["Retry-After"] = str(min(max(math.ceil(server.in_flight.seconds_left), 1), 60))
    elif isinstance(error, RequestTimeoutError):
        # openai's clients repeat a 504 twice by themselves: the same work, for nothing.
        headers["X-Should-Retry"] = "false"
    return failure_response(error, headers)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    message = str(error.detail)
    if error.status_code == 404:
        meant = _route_meant(request)
        message = f"{place} does not exist." + (f" Did you mean {request.method} {meant}?" if meant else "")
    elif error.status_code == 405:
        message = f"{place} is not allowed: wrong method."
    return error_response(message, status=error.status_code, headers=error.headers)


def _route_meant(request: Request) -> str | None:
    """The route that a path misses by slashes, by case, or by a base URL without ``/v1``."""
    path = re.sub("/+", "/", request.url.path[:200]).rstrip("/").lower()
    known = {route.path for route in request.app.routes}
    return next((spelling for spelling in (path, "/v1" + path) if spelling in known), None)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


EXCEPTION_HANDLERS: dict[Any, Any] = {
    StreamLLMError: on_streamllm_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_disconnect,
}
