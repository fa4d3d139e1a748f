"""Work on behalf of clients: it ends when the client goes away, when its time is over, or the server's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from streamllm.errors import EngineDeadError, StreamLLMError
from streamllm.server.request_context import current_request

Result = TypeVar("Result")


class ServerStoppingError(EngineDeadError):
    """The server is going down: it takes no new request, or has ended this one (HTTP 503)."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class RequestTimeoutError(StreamLLMError):
    """A request took longer than ``--request-timeout`` (HTTP 504)."""


class StalledReaderError(StreamLLMError):
    """A client has not read its stream for ``--stream-stall-timeout``; nothing can be said to it."""


@dataclass(slots=True, eq=False)
class _Work:
    task: asyncio.Task[Any]
    deadline: float
    sending_since: Callable[[], float | None]
    ended_by: StreamLLMError | None = None


class InFlight:
    """The work now done for clients, each piece a task that is cancelled when nobody waits for it.

    Args:
        request_timeout: seconds from a request's arrival in which it must be answered; 0 for no limit.
        stall_timeout: seconds in which a client must take a piece of its stream; 0 for no limit.
    """

    def __init__(self, request_timeout: float = 0.0, stall_timeout: float = 0.0) -> None:
        self._request_timeout = request_timeout or float("inf")
        self._stall_timeout = stall_timeout or float("inf")
        self._work: set[_Work] = set()
        self._stop_at: float | None = None

    def __len__(self) -> int:
        return len(self._work)

    @property
    def admits(self) -> bool:
        """Whether new work is taken."""
        return self._stop_at is None

    @property
    def seconds_left(self) -> float:
        """How long a server that takes no new work will still be there."""
        return 0.0 if self._stop_at is None else max(self._stop_at - time.monotonic(), 0.0)

    async def run(
        self,
        receive: Receive,
        work: Coroutine[Any, Any, Result],
        *,
        admitted: bool = False,
        sending_since: Callable[[], float | None] = lambda: None,
    ) -> Result:
        """The result of ``work``, which must free what it holds when cancelled.

        Args:
            receive: the request's ASGI channel, its body read; only a disconnect can still come.
            admitted: the request has been taken already, this is the rest of its answer.
            sending_since: since when (``time.monotonic()``) the client has let a piece wait.

        Raises:
            ClientDisconnect: the client went away; ``work`` has ended.
            ServerStoppingError: no new work is taken, or :meth:`end_all` ended it.
            RequestTimeoutError, StalledReaderError: :meth:`sweep` ended it.
        """
        if not self.admits and not admitted:
            work.close()
            raise ServerStoppingError
        worker = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(receive))
        deadline = current_request().arrival_time + self._request_timeout
        entry = _Work(worker, deadline, sending_since)
        self._work.add(entry)
        try:
            await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not worker.done():
                raise ClientDisconnect
            if worker.cancelled():
                raise entry.ended_by or ServerStoppingError()
            return worker.result()
        finally:
            self._work.discard(entry)
            watcher.cancel()
            if not worker.done():
                worker.cancel()
                await asyncio.wait({worker})
            elif not worker.cancelled():
                # Somebody else's cancellation came as it failed: its error has been seen, there is nobody to
                # tell.
                worker.exception()

    def sweep(self) -> None:
        """End what has run out of time. Called several times a second: cheaper than a timer a request."""
        now = time.monotonic()
        for work in self._work:
            if now >= work.deadline:
                self._end(
                    work, RequestTimeoutError(f"The request took longer than {self._request_timeout:g} s.")
                )
                continue
            since = work.sending_since()
            if since is not None and now - since >= self._stall_timeout:
                self._end(work, StalledReaderError("The client does not read its stream."))

    def stop_admission(self, seconds: float) -> None:
        """Take no new work; what runs has so many seconds left."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + seconds

    def end_all(self) -> None:
        """End everything now, and whatever still comes."""
        self.stop_admission(0.0)
        for work in self._work:
            self._end(work, ServerStoppingError())

    @staticmethod
    def _end(work: _Work, error: StreamLLMError) -> None:
        if work.ended_by is None:
            work.ended_by = error
            work.task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
