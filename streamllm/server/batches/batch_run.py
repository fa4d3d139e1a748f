"""One batch on its way: checked, answered line by line, its results written to files."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from streamllm.server.batches.execution import LineRunner, Places, error_line
from streamllm.server.batches.files import FileStore, StoredFile
from streamllm.server.batches.lines import FileCheck, InputLine, LineError, LineReader, read_line
from streamllm.server.batches.protocol import OUTPUT_PURPOSE
from streamllm.server.batches.store import ENDS, BatchStore, Result, StoredBatch

logger = logging.getLogger("streamllm.server")

PAUSE = 0.002
"""Seconds between two pieces of a file's check, which holds the interpreter's lock meanwhile."""

STORE_RETRY = 1.0
"""Seconds after which a result that could not be stored is stored again."""

_UNANSWERED = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed: the batch was cancelled.",
}


class BatchRun:
    """
    Args:
        batch: as it is stored; the run goes on from there.
        max_body_bytes: of a line's body.
    """

    def __init__(
        self,
        batch: StoredBatch,
        *,
        store: BatchStore,
        files: FileStore,
        lines: LineRunner,
        places: Places,
        max_body_bytes: int,
    ) -> None:
        self._batch = batch
        self._store = store
        self._files = files
        self._lines = lines
        self._places = places
        self._max_body_bytes = max_body_bytes
        self._work: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """The batch is being cancelled: end what runs."""
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Bring the batch to its end.

        Raises:
            OSError, sqlite3.Error: disk or database cannot be used now; a later run may go on.
            CancelledError: the server stops; a later run goes on.
        """
        self._batch = await self._store.refresh(self._batch)
        try:
            if self._batch.status == "validating":
                await self._while_wanted(self._check())
            if self._batch.status == "in_progress":
                await self._while_wanted(self._answer_lines())
            if self._batch.status in ("in_progress", "cancelling"):
                await self._give_up_rest()
        except FileNotFoundError:
            await self.fail([LineError("missing_file", "The input file is not there any more.")])
        if self._batch.status not in ENDS:
            await self._write_results()

    async def fail(self, errors: list[LineError]) -> None:
        """End the batch without results."""
        data = [error.body() for error in errors]
        await self._store.end(
            self._batch,
            [],
            status="failed",
            failed_at=_now(),
            errors={"object": "list", "data": data},
        )
        self._batch = await self._store.refresh(self._batch)

    async def _while_wanted(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` until it is done, the batch is cancelled, or its time is over."""
        self._work = asyncio.ensure_future(work)
        try:
            seconds = self._batch.body["expires_at"] - time.time()
            await asyncio.wait({self._work}, timeout=max(seconds, 0.0))
        finally:
            self._work.cancel()
            await asyncio.wait({self._work})
        if not self._work.cancelled():
            self._work.result()
        self._batch = await self._store.refresh(self._batch)

    # -- check ---------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        body = self._batch.body
        path = self._input_path()
        check = await asyncio.to_thread(FileCheck, path, body["endpoint"], self._max_body_bytes)
        try:
            has_more = True
            while has_more:
                has_more = await asyncio.to_thread(check.advance)
                await asyncio.sleep(PAUSE)
        finally:
            check.close()
        if check.errors:
            await self.fail(check.errors)
            return
        counts = {"total": check.num_lines, "completed": 0, "failed": 0}
        self._batch = await self._store.change(
            self._batch, status="in_progress", in_progress_at=_now(), request_counts=counts
        )

    def _input_path(self) -> Path:
        return self._files.path(self._batch.body["input_file_id"])

    # -- lines ---------------------------------------------------------------------------------------------

    async def _answer_lines(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            async with aclosing(self._unanswered()) as slices:
                async for lines in slices:
                    for line in lines:
                        await self._places.take()
                        task = asyncio.create_task(self._answer(line))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                        # Not in the task, which may be cancelled before it begins.
                        task.add_done_callback(lambda _: self._places.give_back())
            while tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _answer(self, line: InputLine) -> None:
        try:
            request = read_line(line, self._batch.body["endpoint"])
        except LineError as error:  # somebody has changed the file
            result = Result(line.number, True, error_line(None, error.body()))
        else:
            result = await self._lines.run(request, self._batch.owner)
        await self._keep([result])

    async def _unanswered(self) -> AsyncGenerator[list[InputLine], None]:
        """The lines that have no result, a few at a time."""
        reader = await asyncio.to_thread(LineReader, self._input_path(), self._max_body_bytes)
        try:
            while lines := await asyncio.to_thread(reader.read):
                done = await self._store.lines_done(self._batch, lines[0].number, lines[-1].number)
                yield [line for line in lines if line.number not in done]
        finally:
            reader.close()

    async def _keep(self, results: list[Result]) -> None:
        """Store results, however long the disk is full."""
        while True:
            try:
                return await self._store.put(self._batch, results)
            except (sqlite3.Error, OSError):
                logger.exception("a result of %s could not be stored", self._batch.body["id"])
                await asyncio.sleep(STORE_RETRY)

    async def _give_up_rest(self) -> None:
        """What has no result gets an error instead."""
        counts = self._batch.body["request_counts"]
        if counts["completed"] + counts["failed"] == counts["total"]:
            return
        code = "batch_cancelled" if self._batch.status == "cancelling" else "batch_expired"
        if code == "batch_expired" and time.time() < self._batch.body["expires_at"]:
            raise RuntimeError(f"lines of {self._batch.body['id']} have no result")
        error = {"code": code, "message": _UNANSWERED[code]}
        async with aclosing(self._unanswered()) as slices:
            async for lines in slices:
                await self._keep([_unasked(line, error) for line in lines])

    # -- results -------------------------------------------------------------------------------------------

    async def _write_results(self) -> None:
        if self._batch.body["finalizing_at"] is None:
            self._batch = await self._store.change(self._batch, status="finalizing", finalizing_at=_now())
        body = self._batch.body
        output = await self._write_file(is_error=False)
        errors = await self._write_file(is_error=True)
        status = "completed"
        if self._batch.status == "cancelling":
            status = "cancelled"
        elif body["finalizing_at"] >= body["expires_at"]:
            status = "expired"
        await self._store.end(
            self._batch,
            [file for file in (output, errors) if file is not None],
            status=status,
            output_file_id=None if output is None else output.id,
            error_file_id=None if errors is None else errors.id,
            **{f"{status}_at": _now()},
        )

    async def _write_file(self, *, is_error: bool) -> StoredFile | None:
        """The results of one kind as a file; ``None`` if there are none."""
        results = await self._store.results(self._batch, is_error=is_error, after=0)
        if not results:
            return None
        file = await self._files.begin_output()
        try:
            while results:
                text = b"".join(result.output + b"\n" for result in results)
                await asyncio.to_thread(file.write, text)
                after = results[-1].line
                results = await self._store.results(self._batch, is_error=is_error, after=after)
            name = f"{self._batch.body['id']}_{'error' if is_error else 'output'}.jsonl"
            expires_after = self._batch.body["output_expires_after"]
            return await self._files.describe(
                file, self._batch.owner, OUTPUT_PURPOSE, name, expires_after and expires_after["seconds"]
            )
        finally:
            await self._files.end(file)


def _unasked(line: InputLine, error: dict[str, Any]) -> Result:
    try:
        custom_id = read_line(line).custom_id
    except LineError:
        custom_id = None
    return Result(line.number, True, error_line(custom_id, error))


def _now() -> int:
    return int(time.time())
