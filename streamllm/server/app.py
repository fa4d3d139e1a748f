"""The ASGI application: routes, middleware, and the engine's life with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import streamllm
from streamllm.errors import StreamLLMError
from streamllm.sampling_params import SamplingParams
from streamllm.server.access_log import AccessLog
from streamllm.server.adapters import load_lora_adapter, unload_lora_adapter
from streamllm.server.anthropic.routes import count_tokens, messages
from streamllm.server.batches.routes import (
    Batches,
    cancel_batch,
    create_batch,
    delete_file,
    file_content,
    list_batches,
    list_files,
    retrieve_batch,
    retrieve_file,
    upload_file,
)
from streamllm.server.chat import chat_completions
from streamllm.server.completions import completions
from streamllm.server.database import Database, data_folder
from streamllm.server.docs import docs, openapi
from streamllm.server.embeddings import embeddings
from streamllm.server.errors import EXCEPTION_HANDLERS, error_response
from streamllm.server.generation import ServerState
from streamllm.server.http_metrics import HttpMeter, HttpMetrics
from streamllm.server.in_flight import InFlight
from streamllm.server.json_response import json_response
from streamllm.server.log_stats import log_stats
from streamllm.server.metrics import CONTENT_TYPE, Metrics
from streamllm.server.middleware import CORS, OPEN_PATHS, ApiKeys, RequestIds, UnexpectedErrors
from streamllm.server.output_format import OutputFormat
from streamllm.server.pace import Pace
from streamllm.server.page.feed import EngineFeed
from streamllm.server.page.files import page_paths
from streamllm.server.page.routes import page_routes
from streamllm.server.render import detokenize, render_chat, render_completion, tokenize
from streamllm.server.request_origins import RequestOrigins
from streamllm.server.request_traces import list_requests, perfetto, request_trace
from streamllm.server.responses.routes import (
    Responses,
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from streamllm.server.responses.store import ResponseStore
from streamllm.server.tracing import RequestTracer, otlp_exporter
from streamllm.text.chat_renderer import ChatRenderer
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.content_format import CONTENT_FORMATS

if TYPE_CHECKING:
    from streamllm.config import ServerConfig
    from streamllm.engine.adapters import ServedAdapter
    from streamllm.engine.async_engine import AsyncEngine

logger = logging.getLogger("streamllm.server")

SECONDS_A_DAY = 86400.0
WARM_UP_TIMEOUT = 30.0
"""Seconds that the start waits for a first token. Without one the server answers, but is not ready."""


def create_app(engine: AsyncEngine, config: ServerConfig) -> Starlette:
    """The application that serves ``engine``; its lifespan starts and stops the engine.

    Args:
        engine: loaded, not started.
        config: names, keys, CORS and limits; the listening socket is the caller's.

    Raises:
        ModelLoadError: the configured chat template is not valid Jinja.
        ConfigError: a parser that does not exist; a collector of traces that cannot be one.
        ConfigError: an adapter has the name of the model.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.start()
        app.state.warmed_up = await warm_up(engine)
        # The warm-up is nobody's request: what is counted and measured begins after it.
        engine.restart_counters()
        engine.on_request_finished(pace.note)
        app.state.metrics = Metrics(engine, model_names[0], config.metrics_prefix, http_metrics)
        tracer = None
        if exporter is not None:
            tracer = RequestTracer(exporter, model_names[0], app.state.origins, engine.history)
            engine.on_request_finished(tracer.request)
        await store.end_unfinished(time.time())
        batches.runner.start()
        logging_task = None
        if not engine.config.disable_log_stats:
            logging_task = asyncio.ensure_future(log_stats(engine))
        try:
            yield
        finally:
            if logging_task is not None:
                logging_task.cancel()
            await batches.runner.stop()
            await engine.stop()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            database.close()

    routes = _routes(config)
    origins = RequestOrigins()
    http_metrics = HttpMetrics(routes)
    exporter = None if config.otlp_traces_endpoint is None else otlp_exporter(config.otlp_traces_endpoint)
    app = Starlette(
        routes=routes,
        middleware=_middleware(config, origins, http_metrics),
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.origins = origins
    model_names = config.served_model_name or (engine.model_name,)
    engine.adapters.reserve(model_names)
    pace = Pace()
    renderer = _renderer(engine, config)
    app.state.server = ServerState(
        engine=engine,
        config=config,
        model_names=tuple(model_names),
        renderer=renderer,
        output_format=OutputFormat.of_model(config, renderer.template, engine.tokenizer),
        in_flight=InFlight(config.request_timeout, config.stream_stall_timeout),
        pace=pace,
        created=int(time.time()),
    )
    in_flight = app.state.server.in_flight
    app.state.feed = EngineFeed(engine, lambda: in_flight.admits, config.stream_stall_timeout)
    database = Database(data_folder(config) / "server.sqlite")
    max_age = config.store_max_days * SECONDS_A_DAY
    store = ResponseStore(database, max_bytes=config.store_max_bytes, max_age=max_age)
    app.state.responses = Responses(store)
    batches = app.state.batches = Batches(app, database, config, max_age=max_age)
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


def _routes(config: ServerConfig) -> list[Route]:
    routes = list(ROUTES)
    if not config.disable_fastapi_docs:
        routes += DOCS_ROUTES
    if not config.disable_page:
        routes += page_routes()
    return routes


def _middleware(config: ServerConfig, origins: RequestOrigins, http_metrics: HttpMetrics) -> list[Middleware]:
    stack = [Middleware(RequestIds, on_streams=origins.note), Middleware(HttpMeter, metrics=http_metrics)]
    if config.access_log != "off":
        left_out = config.disable_access_log_for_endpoints
        stack.append(Middleware(AccessLog, style=config.access_log, left_out=left_out))
    stack += [
        Middleware(
            CORS,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=("x-request-id", "request-id", "retry-after"),
        ),
        Middleware(UnexpectedErrors),
        Middleware(
            ApiKeys, keys=config.api_key, admin_keys=config.admin_api_key, open_paths=open_paths(config)
        ),
    ]
    return stack


def open_paths(config: ServerConfig) -> frozenset[str]:
    """Paths that need no API key."""
    paths = OPEN_PATHS | {"/metrics"} if config.metrics_without_key else OPEN_PATHS
    return paths if config.disable_page else paths | page_paths()


# -- routes without generation -----------------------------------------------------------------------------


async def list_models(request: Request) -> Response:
    """The names under which the model is served, and its adapters."""
    server: ServerState = request.app.state.server
    cards = [_model_card(server, name) for name in server.model_names]
    cards += [_adapter_card(server, adapter) for adapter in server.engine.adapters.served()]
    return json_response({"object": "list", "data": cards})


async def get_model(request: Request) -> Response:
    """One name under which the model is served, or one adapter."""
    server: ServerState = request.app.state.server
    name = request.path_params["name"]
    server.check_model(name)
    adapter = server.engine.adapters.get(name)
    return json_response(_model_card(server, name) if adapter is None else _adapter_card(server, adapter))


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


def _adapter_card(server: ServerState, adapter: ServedAdapter) -> dict[str, Any]:
    """As vLLM's: ``root`` is the adapter's folder, ``parent`` the model that it adapts."""
    return _model_card(server, adapter.name) | {
        "created": adapter.created,
        "root": adapter.path,
        "parent": server.model_names[0],
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
    return json_response(
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
    return json_response({"version": streamllm.__version__})


async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(await request.app.state.metrics.render(), headers={"content-type": CONTENT_TYPE})


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/chat/completions/render", render_chat, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/completions/render", render_completion, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{id}", retrieve_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", list_input_items, methods=["GET"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/files", upload_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{id}", retrieve_file, methods=["GET"]),
    Route("/v1/files/{id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{id}/content", file_content, methods=["GET"]),
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{id}", retrieve_batch, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", cancel_batch, methods=["POST"]),
    Route("/v1/requests", list_requests, methods=["GET"]),
    Route("/v1/requests/{id:path}/trace", request_trace, methods=["GET"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/load", load, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/debug/perfetto", perfetto, methods=["GET"]),
]

DOCS_ROUTES = [
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
]
