"""Responses that go on without a client: ``background``, and looking on from any number of connections."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.types import Message

from streamllm.errors import InvalidRequestError, StreamLLMError
from streamllm.server.in_flight import InFlight
from streamllm.server.responses.output_items import StreamEvent

if TYPE_CHECKING:
    from streamllm.server.responses.run import ResponseRun

logger = logging.getLogger("streamllm.server")

MAX_RUNNING = 1024
MAX_FINISHED = 64
"""Runs that have ended and whose events can still be looked at."""

Save = Callable[[dict[str, Any]], Awaitable[None]]


class BackgroundRun:
    """A response that goes on by itself.

    Attributes:
        owner: who may see it.
        run: the response.
    """

    def __init__(
        self, owner: str, run: ResponseRun, save: Save, in_flight: InFlight, on_end: Callable[[], None]
    ) -> None:
        self.owner = owner
        self.run = run
        self._save = save
        self._on_end = on_end
        self._events: list[StreamEvent] = []
        self._news = asyncio.Event()
        self._is_cancelled = False
        self._has_ended = False
        self._generating: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._work(in_flight))

    async def cancel(self) -> None:
        """End it, if it has not ended yet, and wait until it has."""
        if self._has_ended:
            return
        self._is_cancelled = True
        if self._generating is not None:
            self._generating.cancel()
        await asyncio.wait({self._task})

    async def events(self, starting_after: int = -1) -> AsyncGenerator[list[StreamEvent], None]:
        """Those behind a sequence number: what there are, then what comes."""
        position = starting_after + 1
        while True:
            news = self._events[position:]
            if news:
                position += len(news)
                yield news
            elif self._has_ended:
                return
            else:
                await self._news.wait()

    async def _work(self, in_flight: InFlight) -> None:
        try:
            await in_flight.run(_nobody_leaves, self._generate())
        except StreamLLMError as error:
            self.run.response |= {
                "status": "failed",
                "error": {"code": "server_error", "message": str(error)},
            }
        finally:
            self.run.abort()
            try:
                await self._save(self.run.response)
            except Exception:
                logger.exception("a response could not be kept")
            self._has_ended = True
            self._tell()
            self._on_end()

    async def _generate(self) -> None:
        self._generating = asyncio.current_task()
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            async with aclosing(self.run.events()) as events:
                async for news in events:
                    self._events += news
                    self._tell()
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            self.run.cancelled()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundRuns:
    """Those of a server, by id."""

    def __init__(self) -> None:
        self._running: dict[str, BackgroundRun] = {}
        self._finished: OrderedDict[str, BackgroundRun] = OrderedDict()

    def start(self, owner: str, run: ResponseRun, save: Save, in_flight: InFlight) -> BackgroundRun:
        """
        Raises:
            InvalidRequestError: (429) too many are running.
        """
        if len(self._running) >= MAX_RUNNING:
            raise InvalidRequestError(
                f"{MAX_RUNNING} responses are running in the background already; try again later.",
                param="background",
                status=429,
            )
        response_id = run.response["id"]

        def end() -> None:
            self._finished[response_id] = self._running.pop(response_id)
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)

        started = self._running[response_id] = BackgroundRun(owner, run, save, in_flight, end)
        return started

    def get(self, owner: str, response_id: str) -> BackgroundRun | None:
        """One that runs or has run lately; ``None`` if there is none of that id for this owner."""
        found = self._running.get(response_id) or self._finished.get(response_id)
        return found if found is not None and found.owner == owner else None

    def forget(self, response_id: str) -> None:
        self._finished.pop(response_id, None)


async def _nobody_leaves() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
