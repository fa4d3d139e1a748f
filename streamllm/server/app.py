"""The ASGI application: routes, middleware, and the engine's life with it."""

from __future__ import annotations

import asyncio
import logging
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
from streamllm.errors import StreamLLMError
from streamllm.sampling_params import SamplingParams
from streamllm.server.access_log import AccessLog
from streamllm.server.chat import chat_completions
from streamllm.server.completions import completions
from streamllm.server.docs import docs, openapi
from streamllm.server.embeddings import embeddings
from streamllm.server.errors import EXCEPTION_HANDLERS, error_response
from streamllm.server.generation import ServerState
from streamllm.server.in_flight import InFlight
from streamllm.server.log_stats import log_stats
from streamllm.server.metrics import CONTENT_TYPE, Metrics
from streamllm.server.middleware import CORS, OPEN_PATHS, ApiKeys, RequestIds, UnexpectedErrors
from streamllm.server.pace import Pace
from streamllm.server.render import detokenize, render_chat, render_completion, tokenize
from streamllm.text.chat_renderer import ChatRenderer
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.content_format import ContentFormat

if TYPE_CHECKING:
    from streamllm.config import ServerConfig
    from streamllm.engine.async_engine import AsyncEngine

logger = logging.getLogger("streamllm.server")

WARM_UP_TIMEOUT = 30.0
"""Seconds that the start waits for a first token. Without one the server answers, but is not ready."""

CONTENT_FORMATS = {
    "auto": None,
    "string": ContentFormat(parts=False, string=True),
    "openai": ContentFormat(parts=True, string=False),
}


def create_app(engine: AsyncEngine, config: ServerConfig) -> Starlette:
    """The application that serves ``engine``; its lifespan starts and stops the engine.

    Args:
        engine: loaded, not started.
        config: names, keys, CORS and limits; the listening socket is the caller's.

    Raises:
        ModelLoadError: the configured chat template is not valid Jinja.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.start()
        app.state.warmed_up = await warm_up(engine)
        # The warm-up is nobody's request: what is counted and measured begins after it.
        engine.restart_counters()
        engine.on_request_finished(pace.note)
        app.state.metrics = Metrics(engine, model_names[0])
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
        routes=ROUTES if config.disable_fastapi_docs else ROUTES + DOCS_ROUTES,
        middleware=_middleware(config),
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    model_names = config.served_model_name or (engine.model_name,)
    pace = Pace()
    app.state.server = ServerState(
        engine=engine,
        config=config,
        model_names=tuple(model_names),
        renderer=_renderer(engine, config),
        in_flight=InFlight(config.request_timeout, config.stream_stall_timeout),
        pace=pace,
        created=int(time.time()),
    )
    return app


async def warm_up(engine: AsyncEngine) -> bool:
    """Generate a token, so that the first client does not wait for what only a first step does. Returns
    whether it came."""
    some_token = next(filter(engine.tokenizer.contains, range(engine.tokenizer.vocab_size)))
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False)
    try:
        stream = await engine.add_request([some_token], params, request_id="warm-up")
        try:
            output = await asyncio.wait_for(anext(stream), WARM_UP_TIMEOUT)
        finally:
            stream.abort()
        return output.finished
    except asyncio.TimeoutError:
        logger.error("no token within %g s of the start", WARM_UP_TIMEOUT)
    except StreamLLMError as error:
        logger.error("the first token could not be generated: %s", error)
    return False


def _renderer(engine: AsyncEngine, config: ServerConfig) -> ChatRenderer:
    """The engine's, or one with the configured template."""
    template = engine.renderer.template
    source = config.chat_template or (template.source if template else None)
    if source is not None:
        template = ChatTemplate(
            source,
            engine.tokenizer.special_token_strings,
            CONTENT_FORMATS[config.chat_template_content_format],
        )
    return ChatRenderer(
        engine.tokenizer, template, engine.renderer.check_text, config.chat_template_variables
    )


def _middleware(config: ServerConfig) -> list[Middleware]:
    stack = [Middleware(RequestIds)]
    if config.access_log != "off":
        left_out = config.disable_access_log_for_endpoints
        stack.append(Middleware(AccessLog, style=config.access_log, left_out=left_out))
    open_paths = OPEN_PATHS | {"/metrics"} if config.metrics_without_key else OPEN_PATHS
    stack += [
        Middleware(
            CORS,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        ),
        Middleware(UnexpectedErrors),
        Middleware(ApiKeys, keys=config.api_key, admin_keys=config.admin_api_key, open_paths=open_paths),
    ]
    return stack


# -- routes without generation -----------------------------------------------------------------------------


async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    server: ServerState = request.app.state.server
    return _json({"object": "list", "data": [_model_card(server, name) for name in server.model_names]})


async def get_model(request: Request) -> Response:
    """One name under which the model is served."""
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


async def ready(request: Request) -> Response:
    """200 once a token has been generated, while requests are taken; else 503."""
    server: ServerState = request.app.state.server
    if not server.in_flight.admits:
        return error_response("The server is shutting down.", status=503)
    if not request.app.state.warmed_up and not server.engine.has_generated:
        return error_response("No token has been generated yet.", status=503)
    return await health(request)


async def load(request: Request) -> Response:
    """How busy the server is: requests in flight (vLLM's ``server_load``), sequences running and waiting."""
    server: ServerState = request.app.state.server
    stats = server.engine.stats()
    return _json(
        {
            "server_load": len(server.in_flight),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
        }
    )


async def reset_prefix_cache(request: Request) -> Response:
    """Forget the prefix cache; running requests go on."""
    request.app.state.server.engine.reset_prefix_cache()
    return Response(status_code=200)


async def version(request: Request) -> Response:
    """streamllm's version."""
    return _json({"version": streamllm.__version__})


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(request.app.state.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/completions/render", render_completion, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/load", load, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]

DOCS_ROUTES = [
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
]
