"""Which batches run, and in which of the servers that share a folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from streamllm.server.batches.batch_run import BatchRun
from streamllm.server.batches.execution import LineRunner, Places
from streamllm.server.batches.files import FileStore
from streamllm.server.batches.lines import LineError
from streamllm.server.batches.store import BatchStore, StoredBatch

logger = logging.getLogger("streamllm.server")

MAX_RUNNING = 8
"""Batches that run at once, the oldest; the others wait."""

LOOK_INTERVAL = 1.0
"""Seconds after which it is looked for batches that another server has taken or cancelled."""

TIDY_INTERVAL = 600.0
"""Seconds between two removals of what is too old."""

RETRY = 5.0
"""Seconds after which a batch that disk or database has stopped goes on."""


class FolderLock:
    """Held by one process of those that share a folder; free again when that process is gone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self) -> bool:
        """Whether this process has it now; never waits."""
        if self._file is not None:
            return True
        import fcntl

        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class BatchRunner:
    """Runs the batches of a folder while it has the folder's lock.

    Args:
        lock: of the folder.
        max_body_bytes: of a line's body.
    """

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        *,
        lines: LineRunner,
        places: Places,
        lock: FolderLock,
        max_body_bytes: int,
    ) -> None:
        self._store = store
        self._files = files
        self._lock = lock
        self._parts: dict[str, Any] = {
            "store": store,
            "files": files,
            "lines": lines,
            "places": places,
            "max_body_bytes": max_body_bytes,
        }
        self._runs: dict[int, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._tidy_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with what there is, and take what comes."""
        self._looking = asyncio.create_task(self._look_for_ever(), name="streamllm-batches")

    async def stop(self) -> None:
        """Leave everything as it is; a later life goes on from there."""
        tasks = {*self._tasks, *({self._looking} if self._looking else ())}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._lock.release()

    def wake(self) -> None:
        """A batch has come, or is being cancelled."""
        self._news.set()

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look()
            except (sqlite3.Error, OSError):
                logger.exception("the batches could not be read")
                await asyncio.sleep(RETRY)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_INTERVAL)
            self._news.clear()

    async def _look(self) -> None:
        if not self._store.exists or not self._lock.acquire():
            return
        if time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + TIDY_INTERVAL
            await self._tidy()
        for batch in await self._store.unfinished(MAX_RUNNING):
            run = self._runs.get(batch.number)
            if run is None:
                self._begin(batch)
            elif batch.status == "cancelling":
                run.cancel()

    def _begin(self, batch: StoredBatch) -> None:
        run = self._runs[batch.number] = BatchRun(batch, **self._parts)
        task = asyncio.create_task(self._run(batch, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: StoredBatch, run: BatchRun) -> None:
        try:
            await run.run()
        except (sqlite3.Error, OSError):
            logger.exception("%s is interrupted and goes on later", batch.body["id"])
            await asyncio.sleep(RETRY)
        except Exception:
            logger.exception("%s failed", batch.body["id"])
            await run.fail([LineError("server_error", "The server failed to process the batch.")])
        finally:
            del self._runs[batch.number]
            self.wake()

    async def _tidy(self) -> None:
        await self._files.remove_expired()
        await self._files.remove_orphans()
        await self._store.remove_leftovers()
        await self._store.remove_old()
