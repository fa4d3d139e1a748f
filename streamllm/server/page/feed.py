"""``GET /engine/events``: the engine's blocks, requests and figures as a stream of events.

- ``snapshot``: ``block_size``, ``num_blocks``, ``interval`` (seconds between two looks at least) and all that
  there is to know of the blocks; the first event, and again after a watcher fell behind;
- ``blocks``: what has changed since (:class:`~streamllm.engine.watch.BlockNews`);
- ``overview``: requests and figures (:class:`~streamllm.engine.watch.Overview`), twice a second;
- ``end``: the server goes down.

One look serves all watchers. Without any there is none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from streamllm.server.errors import error_response
from streamllm.server.in_flight import InFlight
from streamllm.server.sse import EventStream, Write, named_frame

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.watch import EngineWatch

INTERVAL = 0.1
"""Seconds between two looks at the blocks, at least."""

OVERVIEW_INTERVAL = 0.5
"""Seconds between two overviews, at least."""

MAX_SHARE = 0.01
"""Share of the event loop's time that all looks may take: those that take longer come less often."""

MAX_WATCHERS = 8

MAX_WAITING_FRAMES = 32
"""Events that wait for a slow reader before it gets a snapshot instead."""


class _Watcher:
    """What one reader has not been sent yet.

    Attributes:
        frames: events, oldest first.
        behind: it is to have a snapshot in place of them.
    """

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.behind = True
        self.news = asyncio.Event()

    def push(self, frame: bytes) -> None:
        if len(self.frames) >= MAX_WAITING_FRAMES:
            self.frames.clear()
            self.behind = True
        self.frames.append(frame)
        self.news.set()


class EngineFeed:
    """
    Args:
        engine: what is watched.
        admits: whether the server still takes requests; the streams end when it does not.
        stall_timeout: seconds that a watcher may leave its stream unread; 0 for no limit.
    """

    def __init__(self, engine: AsyncEngine, admits: Callable[[], bool], stall_timeout: float = 0.0) -> None:
        self._engine = engine
        self._admits = admits
        # Of its own: a watcher is no request that the server's load counts, limits in time and waits for.
        self._in_flight = InFlight(stall_timeout=stall_timeout)
        self._watchers: set[_Watcher] = set()
        self._watch: EngineWatch | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_looks = 0

    def respond(self) -> Response:
        """A stream of events, or 429 if :data:`MAX_WATCHERS` have one."""
        if len(self._watchers) >= MAX_WATCHERS:
            message = f"{MAX_WATCHERS} pages watch the engine already; close one of them."
            return error_response(message, status=429, headers={"Retry-After": "5"})
        watcher = _Watcher()
        self._watchers.add(watcher)
        if self._task is None:
            self._watch = self._engine.watch()
            self._task = asyncio.create_task(self._run(self._watch), name="streamllm-engine-feed")

        def frames(write: Write) -> AsyncGenerator[bytes, None]:
            return self._frames(watcher)

        return EventStream(
            frames,
            in_flight=self._in_flight,
            release=lambda: self._watchers.discard(watcher),
            farewell=lambda error: named_frame("end", {}),
        )

    async def _frames(self, watcher: _Watcher) -> AsyncGenerator[bytes, None]:
        while True:
            await watcher.news.wait()
            watcher.news.clear()
            if self._watch is None:
                return
            # A snapshot is of the last look, so that it holds whatever of these frames tells of blocks.
            data = self._snapshot(self._watch) if watcher.behind else b"".join(watcher.frames)
            watcher.behind = False
            watcher.frames.clear()
            yield data

    async def _run(self, watch: EngineWatch) -> None:
        """Looks as long as there are watchers."""
        overview_at = 0.0
        try:
            while self._watchers and self._admits():
                began = time.perf_counter()
                self._look(watch)
                if began >= overview_at:
                    overview_at = began + OVERVIEW_INTERVAL
                    self._push("overview", watch.overview())
                self._in_flight.sweep()
                cost = time.perf_counter() - began
                await asyncio.sleep(max(INTERVAL, cost / MAX_SHARE))
        finally:
            self._task = self._watch = None
            for watcher in self._watchers:
                watcher.news.set()

    def _look(self, watch: EngineWatch) -> None:
        self.num_looks += 1
        news = watch.look()
        if news:
            self._push("blocks", news)
        for watcher in self._watchers:
            if watcher.behind:
                watcher.news.set()

    def _push(self, name: str, event: Any) -> None:
        frame = named_frame(name, event)
        for watcher in self._watchers:
            if not watcher.behind:
                watcher.push(frame)

    def _snapshot(self, watch: EngineWatch) -> bytes:
        stats = self._engine.stats()
        event = {"block_size": stats.block_size, "num_blocks": stats.num_blocks, "interval": INTERVAL}
        return named_frame("snapshot", {**event, **asdict(watch.snapshot())})


async def engine_events(request: Request) -> Response:
    """The engine's KV blocks, live requests and figures as server-sent events, for the page."""
    feed: EngineFeed = request.app.state.feed
    return feed.respond()
