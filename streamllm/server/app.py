"""The ASGI application: routes, middleware, and the engine's life with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import streamllm
from streamllm.server.chat import chat_completions
from streamllm.server.completions import completions
from streamllm.server.errors import EXCEPTION_HANDLERS, error_response
from streamllm.server.generation import ServerState
from streamllm.server.in_flight import InFlight
from streamllm.server.log_stats import log_stats
from streamllm.server.metrics import CONTENT_TYPE, Metrics
from streamllm.server.middleware import CORS, ApiKeys, RequestIds, UnexpectedErrors
from streamllm.server.pace import Pace

if TYPE_CHECKING:
    from streamllm.config import ServerConfig
    from streamllm.engine.async_engine import AsyncEngine


def create_app(engine: AsyncEngine, config: ServerConfig) -> Starlette:
    """The application that serves ``engine``; its lifespan starts and stops the engine.

    Args:
        engine: loaded, not started.
        config: names, keys, CORS and limits; the listening socket is the caller's.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.start()
        logging_task = None
        if not engine.config.disable_log_stats:
            logging_task = asyncio.ensure_future(log_stats(engine))
        try:
            yield
        finally:
            if logging_task is not None:
                logging_task.cancel()
            await engine.stop()

    app = Starlette(
        routes=ROUTES,
        middleware=_middleware(config),
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    model_names = config.served_model_name or (engine.model_name,)
    pace = Pace()
    engine.on_request_finished(pace.note)
    app.state.server = ServerState(
        engine=engine,
        config=config,
        model_names=tuple(model_names),
        in_flight=InFlight(),
        pace=pace,
        created=int(time.time()),
    )
    app.state.metrics = Metrics(engine, model_names[0])
    return app


def _middleware(config: ServerConfig) -> list[Middleware]:
    stack = [
        Middleware(
            CORS,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        ),
        Middleware(RequestIds),
        Middleware(UnexpectedErrors),
    ]
    if config.api_key:
        stack.append(Middleware(ApiKeys, keys=config.api_key))
    return stack


# -- routes without generation -----------------------------------------------------------------------------


async def list_models(request: Request) -> Response:
    server: ServerState = request.app.state.server
    return _json({"object": "list", "data": [_model_card(server, name) for name in server.model_names]})


async def get_model(request: Request) -> Response:
    server: ServerState = request.app.state.server
    name = request.path_params["name"]
    server.check_model(name)
    return _json(_model_card(server, name))


def _model_card(server: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "streamllm",
        "root": server.engine.model_name,
        "parent": None,
        "max_model_len": server.engine.max_model_len,
    }


async def health(request: Request) -> Response:
    """200 while the engine can serve, else 503."""
    engine = request.app.state.server.engine
    if engine.is_healthy:
        return Response(status_code=200)
    return error_response(engine.dead_error or "The engine does not answer.", status=503)


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the prefix cache; running requests go on."""
    request.app.state.server.engine.reset_prefix_cache()
    return Response(status_code=200)


async def version(request: Request) -> Response:
    return _json({"version": streamllm.__version__})


async def metrics(request: Request) -> Response:
    return Response(request.app.state.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
