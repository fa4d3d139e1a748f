"""One engine behind its HTTP server in a thread, for a process that has an event loop of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from streamllm.errors import EngineDeadError
from streamllm.server.run import make_server
from streamllm.server.watchdog import Watchdog

if TYPE_CHECKING:
    from streamllm.config import ServerConfig
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.stats import RequestRecord

Result = TypeVar("Result")

ANSWER_SECONDS = 10.0
"""In which the engine's loop must answer a question about it."""

LOOK_BACK_SECONDS = 60.0
"""For which a first token's time counts."""


class ReplicaServer:
    """Serves an engine on a free port until :meth:`stop`.

    Args:
        engine: loaded, not started.
        config: of the server; ``host`` is where it listens, ``port`` is not used.

    Raises:
        RuntimeError: the server ended before it began; the log says why.
        ConfigError, ModelLoadError: as :func:`streamllm.server.app.create_app`.
    """

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self._engine = engine
        self._first_tokens: deque[tuple[float, float]] = deque()
        self._watchdog = Watchdog(config.watchdog_timeout)
        self._server = make_server(engine, config, self._watchdog)
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._sock = socket.create_server((config.host, 0), family=family, backlog=2048)
        self.host, self.port = self._sock.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.02)
            if not self._thread.is_alive():
                raise RuntimeError("the replica's server could not be started; its log says why")
        self._loop = self._server.servers[0].get_loop()
        engine.on_request_finished(self._note)  # from now on: the start's own request is nobody's

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._sock])
        finally:
            self._watchdog.stop()  # the process is not the server's own: it need not end with it

    def _note(self, record: RequestRecord) -> None:
        seconds = record.time_to_first_token
        if seconds is not None:
            self._first_tokens.append((record.finished_time, seconds))

    async def load(self) -> dict[str, float]:
        """``load``: tokens of all requests that wait or run; ``time``: of the report, by the wall clock."""
        return await self._ask(self._load())

    async def use(self) -> dict[str, float]:
        """The fields of :class:`streamllm.deploy.autoscaling.ReplicaUse`."""
        return await self._ask(self._use())

    async def check(self) -> None:
        """Raises:
        EngineDeadError: the engine is dead or its loop does not answer.
        """
        await self._ask(self._check())

    def stop(self) -> None:
        """Let requests end within ``shutdown_timeout``, then end them; returns when the engine stands."""
        self._server.should_exit = True
        self._thread.join()

    async def _ask(self, question: Coroutine[Any, Any, Result]) -> Result:
        """The answer of a coroutine that runs on the engine's loop."""
        if not self._thread.is_alive():
            question.close()
            raise EngineDeadError(self._engine.dead_error or "The replica's server has ended.")
        answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, self._loop))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except asyncio.TimeoutError:
            message = f"The replica's event loop has not answered for {ANSWER_SECONDS:g} s."
            raise EngineDeadError(message) from None

    async def _load(self) -> dict[str, float]:
        live = self._engine.live_requests()
        tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in live)
        return {"load": float(tokens), "time": time.time()}

    async def _use(self) -> dict[str, float]:
        stats, now = self._engine.stats(), time.monotonic()
        recent = self._first_tokens
        while recent and now - recent[0][0] > LOOK_BACK_SECONDS:
            recent.popleft()
        return {
            "queued_tokens": float(stats.num_waiting_tokens),
            "running_share": stats.num_running / self._engine.config.max_num_seqs,
            "first_token": sum(seconds for _, seconds in recent) / len(recent) if recent else 0.0,
        }

    async def _check(self) -> None:
        if not self._engine.is_healthy:
            raise EngineDeadError(self._engine.dead_error or "The engine does not answer.")
