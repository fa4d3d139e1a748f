"""Work on behalf of clients: it ends when the client goes away or when the server's time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamllm.errors import EngineDeadError

Result = TypeVar("Result")


class ServerStoppingError(EngineDeadError):
    """The server is going down and has ended the request (HTTP 503)."""


class InFlight:
    """The work now done for clients, each piece a task that is cancelled when nobody waits for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which must free what it holds when cancelled.

        Args:
            receive: the request's ASGI channel, its body read; only a disconnect can still come.

        Raises:
            ClientDisconnect: the client went away; ``work`` has ended.
            ServerStoppingError: :meth:`end_all` ended it.
        """
        if self._stopping:
            work.close()
            raise ServerStoppingError("The server is shutting down.")
        worker = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(receive))
        self._tasks.add(worker)
        try:
            await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not worker.done():
                raise ClientDisconnect
            if worker.cancelled():
                raise ServerStoppingError("The server is shutting down.")
            return worker.result()
        finally:
            self._tasks.discard(worker)
            watcher.cancel()
            if not worker.done():
                worker.cancel()
                await asyncio.wait({worker})

    def end_all(self) -> None:
        """End everything now, and whatever still comes."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
