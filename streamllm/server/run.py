"""The server process: uvicorn around the application, signals, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from streamllm.server.access_log import log_to_stdout
from streamllm.server.app import create_app
from streamllm.server.generation import ServerState
from streamllm.server.http_protocol import http_protocol
from streamllm.server.metrics import full_prefix
from streamllm.server.tracing import otlp_exporter
from streamllm.server.watchdog import Watchdog

if TYPE_CHECKING:
    from streamllm.config import ServerConfig
    from streamllm.engine.async_engine import AsyncEngine

logger = logging.getLogger("streamllm.server")

DEAD_ENGINE_GRACE = 2.0
"""Seconds for which a server whose engine died still answers (503) before it exits."""

LAST_RESORT = 5.0
"""Seconds after the end of all requests when uvicorn cancels what is left."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than the pools of usual proxies (60 s), so that the
server never closes one that is just being used."""


def serve(engine_factory: Callable[[], AsyncEngine], server_config: ServerConfig, sock: socket.socket) -> int:
    """Load the engine and serve it until a signal comes or the engine dies.

    SIGTERM or SIGINT: new requests get 503 with ``Retry-After``, running ones ``shutdown_timeout`` seconds,
    then streams end with an error event and other requests with 503. A second signal ends them at once. An
    event loop that stands still for ``watchdog_timeout`` seconds ends the process with all stacks printed.

    Args:
        engine_factory: loads the engine; called once, before the event loop runs.
        sock: bound; closed at the end.

    Returns:
        The process's exit code: 0 after a signal, 1 after the engine's death.

    Raises:
        StreamLLMError: whatever loading raises.
    """
    if server_config.otlp_traces_endpoint is not None:
        otlp_exporter(server_config.otlp_traces_endpoint).shutdown()  # says at once what is wrong
    full_prefix(server_config.metrics_prefix)
    engine = engine_factory()
    calm_garbage_collector()
    log_to_stdout()
    watchdog = Watchdog(server_config.watchdog_timeout)
    server = make_server(engine, server_config, watchdog)
    server.run(sockets=[sock])
    return 0 if server.started and not server.engine_died else 1


def calm_garbage_collector() -> None:
    """Once all is loaded: what lives as long as the process need not be visited in the middle of a step,
    and the thousand short-lived objects of a step of 256 sequences need not set off a collection each time (a
    tenth of the event loop's time otherwise)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


def make_server(engine: AsyncEngine, config: ServerConfig, watchdog: Watchdog | None = None) -> Server:
    """A server around a loaded engine; ``server.run(sockets=[sock])`` serves until it is told to stop.

    Args:
        watchdog: ends the process; without one, whoever runs the server looks after it.
    """
    app = create_app(engine, config)
    uvicorn_config = uvicorn.Config(
        app,
        loop="uvloop",
        http=http_protocol(config.max_header_bytes, config.max_headers),
        ws="none",
        root_path=config.root_path.rstrip("/"),
        lifespan="on",
        log_level=config.uvicorn_log_level,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(LAST_RESORT),
        server_header=False,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.VerifyMode(config.ssl_cert_reqs),
    )
    return Server(uvicorn_config, app.state.server, watchdog)


class Server(uvicorn.Server):
    """uvicorn's server with a drain that has an end, and an eye on the engine."""

    def __init__(self, config: uvicorn.Config, state: ServerState, watchdog: Watchdog | None) -> None:
        super().__init__(config)
        self._state = state
        self._watchdog = watchdog
        self._engine_died_at: float | None = None
        self._at_once = False

    @property
    def engine_died(self) -> bool:
        """Whether the engine died while it was being served."""
        return self._engine_died_at is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again when it is done; here a drained server has succeeded.
        self._at_once = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.beat()
        await super().startup(sockets)
        scheme = "https" if self._state.config.ssl_certfile else "http"
        for sock in sockets or []:
            if sock.family == socket.AF_UNIX:
                logger.info(
                    "serving %s on the Unix socket %s", self._state.model_names[0], sock.getsockname()
                )
                continue
            host, port = sock.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            logger.info("serving %s on %s://%s:%d", self._state.model_names[0], scheme, host, port)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        self._look_after()
        died_at = self._engine_died_at
        if died_at is not None and time.monotonic() - died_at >= DEAD_ENGINE_GRACE:
            self.should_exit = True
        return await super().on_tick(counter)

    def _look_after(self) -> None:
        """What has to be seen to several times a second, while serving and while draining."""
        if self._watchdog is not None:
            self._watchdog.beat()
        state = self._state
        state.in_flight.sweep()
        step_timeout = state.config.step_timeout
        if step_timeout and state.engine.step_seconds > step_timeout:
            state.engine.fail(f"no step has finished for {step_timeout:g} s")
        if state.engine.dead_error is not None and self._engine_died_at is None:
            self._engine_died_at = time.monotonic()
            logger.error("the engine died, exiting: %s", state.engine.dead_error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain()
        if self._watchdog is not None:
            # A step that never returns would hold up the end of the executor, and so of the process.
            self._watchdog.end_within(3 * LAST_RESORT)
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Let requests end by themselves, until the time is over or a second signal comes; then end them.

        Meanwhile connections are still taken: what comes is told so rather than reset.
        """
        in_flight = self._state.in_flight
        in_flight.stop_admission(self._state.config.shutdown_timeout)
        # A signal handler may not touch the loop, so its word is looked for.
        while len(in_flight) and in_flight.seconds_left and not self._at_once:
            self._look_after()
            await asyncio.sleep(0.05)
        if len(in_flight):
            logger.warning("ending %d unfinished requests", len(in_flight))
        in_flight.end_all()
