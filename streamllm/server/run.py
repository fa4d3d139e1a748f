"""The server process: uvicorn around the application, signals, and the exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from streamllm.server.app import create_app
from streamllm.server.generation import ServerState

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

    SIGTERM or SIGINT: no new connections, running requests get ``shutdown_timeout`` seconds, then streams end
    with an error event and other requests with 503. A second signal ends them at once.

    Args:
        engine_factory: loads the engine; called once, before the event loop runs.
        sock: bound; closed at the end.

    Returns:
        The process's exit code: 0 after a signal, 1 after the engine's death.

    Raises:
        StreamLLMError: whatever loading raises.
    """
    engine = engine_factory()
    # What has been loaded lives as long as the process: no collection need visit it in the middle of a step.
    gc.collect()
    gc.freeze()
    server = make_server(engine, server_config)
    server.run(sockets=[sock])
    return 0 if server.started and not server.engine_died else 1


def make_server(engine: AsyncEngine, config: ServerConfig) -> Server:
    """A server around a loaded engine; ``server.run(sockets=[sock])`` serves until it is told to stop."""
    app = create_app(engine, config)
    uvicorn_config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_level=config.uvicorn_log_level,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(config.shutdown_timeout + LAST_RESORT),
        server_header=False,
    )
    return Server(uvicorn_config, app.state.server)


class Server(uvicorn.Server):
    """uvicorn's server with a drain that has an end, and an eye on the engine."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
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
        await super().startup(sockets)
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            logger.info("serving %s on http://%s:%d", self._state.model_names[0], host, port)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        dead_error = self._state.engine.dead_error
        if dead_error is not None:
            if self._engine_died_at is None:
                self._engine_died_at = time.monotonic()
                logger.error("the engine died, exiting: %s", dead_error)
            if time.monotonic() - self._engine_died_at >= DEAD_ENGINE_GRACE:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        """End what still runs when the time is over, or at a second signal."""
        deadline = time.monotonic() + self._state.config.shutdown_timeout
        # A signal handler may not touch the loop, so its word is looked for.
        while time.monotonic() < deadline and not self._at_once:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        logger.warning("ending %d unfinished requests", len(self._state.in_flight))
        self._state.in_flight.end_all()
