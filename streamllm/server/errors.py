"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from streamllm.errors import EngineDeadError, InvalidRequestError, QueueFullError, StreamLLMError

logger = logging.getLogger("streamllm.server")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left before its answer; nobody reads it but the log."""


def error_body(
    message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error; its type follows from the HTTP status."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
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
        return status, error_body(str(error), status=status)
    logger.error("a request failed", exc_info=error)
    return 500, error_body("The server failed to process the request.", status=500)


def failure_response(error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    status, body = body_of_failure(error)
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")


async def on_streamllm_error(request: Request, error: Exception) -> Response:
    """What streamllm raises on purpose; a full queue says when to come again."""
    if not isinstance(error, QueueFullError):
        return failure_response(error)
    return failure_response(error, {"Retry-After": str(request.app.state.server.retry_after())})


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    message = {404: f"{place} does not exist.", 405: f"{place} is not allowed: wrong method."}.get(
        error.status_code, str(error.detail)
    )
    return error_response(message, status=error.status_code, headers=error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


EXCEPTION_HANDLERS: dict[Any, Any] = {
    StreamLLMError: on_streamllm_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_disconnect,
}
