"""Batches and the results of their lines, as they survive the server."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from streamllm.errors import InvalidRequestError
from streamllm.server.batches.files import StoredFile, insert_file
from streamllm.server.batches.paging import select_page
from streamllm.server.database import Database, give_back
from streamllm.server.query import Page

_SCHEMA = (
    """
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        input_file TEXT NOT NULL,
        status TEXT NOT NULL,
        is_open INTEGER NOT NULL,
        completed INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        batch BLOB NOT NULL
    );
    CREATE INDEX batches_by_owner ON batches (owner, number);
    CREATE INDEX open_batches ON batches (number) WHERE is_open;
    CREATE TABLE batch_results (
        batch INTEGER NOT NULL,
        line INTEGER NOT NULL,
        is_error INTEGER NOT NULL,
        result BLOB NOT NULL
    );
    CREATE UNIQUE INDEX results_by_line ON batch_results (batch, line)
    """,
)
_COLUMNS = "number, owner, completed, failed, batch"

ENDS = ("completed", "failed", "expired", "cancelled")
"""Statuses that are the last."""

RESULT_BYTES = 2**22
"""Of results that are read at a time."""
ROWS_AT_A_TIME = 500


class Result(NamedTuple):
    """What came of a line.

    Attributes:
        line: its number in the file.
        output: the line of the output file, or of the error file, without its end.
    """

    line: int
    is_error: bool
    output: bytes


@dataclass(frozen=True)
class StoredBatch:
    """
    Attributes:
        number: in order of creation.
        body: the batch as clients see it.
    """

    number: int
    owner: str
    body: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.body["status"])


class BatchStore:
    """
    Args:
        max_age: seconds after which a batch that has ended goes.
    """

    def __init__(self, database: Database, *, max_age: float) -> None:
        database.add_schema("batches", _SCHEMA)
        self._database = database
        self._max_age = max_age

    @property
    def exists(self) -> bool:
        """Whether anything may have been stored yet."""
        return self._database.exists

    async def create(self, owner: str, body: dict[str, Any]) -> None:
        row = (
            body["id"],
            owner,
            body["input_file_id"],
            body["status"],
            body["created_at"],
            orjson.dumps(body),
        )

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO batches (id, owner, input_file, status, is_open, completed, failed, created_at,"
                " batch) VALUES (?, ?, ?, ?, 1, 0, 0, ?, ?)",
                row,
            )

        await self._database.run(work)

    async def get(self, owner: str, batch_id: str) -> StoredBatch | None:
        """A batch; ``None`` if there is none of that id for this owner."""
        if not self._database.exists:
            return None

        def work(connection: sqlite3.Connection) -> StoredBatch | None:
            row = connection.execute(
                f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
            ).fetchone()
            return _stored(row) if row else None

        return await self._database.run(work)

    async def refresh(self, batch: StoredBatch) -> StoredBatch:
        """The batch as it is now."""
        return await self._database.run(lambda connection: _get(connection, batch.number))

    async def select(self, owner: str, page: Page) -> tuple[list[StoredBatch], bool]:
        """A page of an owner's batches, and whether there are more.

        Raises:
            InvalidRequestError: ``page.after`` names none of them.
        """
        if not self._database.exists and page.after is None:
            return [], False
        rows, has_more = await self._database.run(
            lambda connection: select_page(connection, "batches", _COLUMNS, page, {"owner": owner})
        )
        return [_stored(row) for row in rows], has_more

    async def unfinished(self, most: int) -> list[StoredBatch]:
        """Batches that have not ended, those that are being cancelled first, then the oldest."""

        def work(connection: sqlite3.Connection) -> list[StoredBatch]:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM batches WHERE is_open"
                " ORDER BY status != 'cancelling', number LIMIT ?",
                (most,),
            ).fetchall()
            return [_stored(row) for row in rows]

        return await self._database.run(work)

    async def change(self, batch: StoredBatch, **fields: Any) -> StoredBatch:
        """Change fields of a batch that has not ended; one that is being cancelled keeps that status."""

        def work(connection: sqlite3.Connection) -> StoredBatch:
            current = _get(connection, batch.number)
            kept = {"status": "cancelling"} if current.status == "cancelling" else {}
            return _write(connection, current, fields | kept)

        return await self._database.run(work)

    async def cancel(self, batch: StoredBatch) -> StoredBatch:
        """Ask for the end of a batch.

        Raises:
            InvalidRequestError: (409) it has ended, or is about to.
        """

        def work(connection: sqlite3.Connection) -> StoredBatch:
            current = _get(connection, batch.number)
            if current.status in ("cancelling", "cancelled"):
                return current
            if current.status not in ("validating", "in_progress"):
                raise InvalidRequestError(
                    f"A batch whose status is {current.status} cannot be cancelled.", param="id", status=409
                )
            return _write(connection, current, {"status": "cancelling", "cancelling_at": int(time.time())})

        return await self._database.run(work)

    async def end(self, batch: StoredBatch, files: Sequence[StoredFile], **fields: Any) -> None:
        """The last change of a batch, with the files of its results."""

        def work(connection: sqlite3.Connection) -> None:
            for file in files:
                insert_file(connection, file)
            _write(connection, _get(connection, batch.number), fields)

        await self._database.run(work)
        await self.clear_results(batch.number)

    # -- results -------------------------------------------------------------------------------------------

    async def put(self, batch: StoredBatch, results: Sequence[Result]) -> None:
        """Keep what came of lines; of a line that has a result already, that one stays."""

        def work(connection: sqlite3.Connection) -> None:
            completed = failed = 0
            for result in results:
                added = connection.execute(
                    "INSERT OR IGNORE INTO batch_results VALUES (?, ?, ?, ?)", (batch.number, *result)
                ).rowcount
                completed += added and not result.is_error
                failed += added and result.is_error
            connection.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE number = ?",
                (completed, failed, batch.number),
            )

        await self._database.run(work)

    async def lines_done(self, batch: StoredBatch, first: int, last: int) -> set[int]:
        """The lines of a range that have a result."""

        def work(connection: sqlite3.Connection) -> set[int]:
            rows: Iterable[tuple[int]] = connection.execute(
                "SELECT line FROM batch_results WHERE batch = ? AND line BETWEEN ? AND ?",
                (batch.number, first, last),
            )
            return {line for (line,) in rows}

        return await self._database.run(work)

    async def results(self, batch: StoredBatch, *, is_error: bool, after: int) -> list[Result]:
        """Some results of one kind behind a line, in the order of the lines; none at the end."""

        def work(connection: sqlite3.Connection) -> list[Result]:
            found, size = [], 0
            for line, output in connection.execute(
                "SELECT line, result FROM batch_results WHERE batch = ? AND line > ? AND is_error = ?"
                " ORDER BY line",
                (batch.number, after, is_error),
            ):
                found.append(Result(line, is_error, output))
                size += len(output)
                if size >= RESULT_BYTES or len(found) >= ROWS_AT_A_TIME:
                    break
            return found

        return await self._database.run(work)

    async def clear_results(self, number: int) -> None:
        """Forget the results of a batch that has ended: they are in its files."""

        def work(connection: sqlite3.Connection) -> int:
            removed = connection.execute(
                "DELETE FROM batch_results WHERE rowid IN"
                " (SELECT rowid FROM batch_results WHERE batch = ? LIMIT ?)",
                (number, ROWS_AT_A_TIME),
            ).rowcount
            if removed:
                give_back(connection, 4096)
            return removed

        while await self._database.run(work):
            pass

    async def remove_leftovers(self) -> None:
        """What a server that was killed had not come to: results of batches that have ended."""

        def work(connection: sqlite3.Connection) -> list[int]:
            rows = connection.execute(
                "SELECT number FROM batches WHERE NOT is_open AND"
                " EXISTS (SELECT 1 FROM batch_results WHERE batch = number)"
            ).fetchall()
            return [row[0] for row in rows]

        for number in await self._database.run(work):
            await self.clear_results(number)

    async def remove_old(self) -> None:
        """Forget batches that ended and are too old."""
        before = time.time() - self._max_age

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM batches WHERE NOT is_open AND created_at < ?", (before,))

        await self._database.run(work)


def _stored(row: Sequence[Any]) -> StoredBatch:
    number, owner, completed, failed, stored = row
    body = orjson.loads(stored)
    body["request_counts"] |= {"completed": completed, "failed": failed}
    return StoredBatch(number, owner, body)


def _get(connection: sqlite3.Connection, number: int) -> StoredBatch:
    return _stored(
        connection.execute(f"SELECT {_COLUMNS} FROM batches WHERE number = ?", (number,)).fetchone()
    )


def _write(connection: sqlite3.Connection, current: StoredBatch, fields: dict[str, Any]) -> StoredBatch:
    body = current.body | fields
    connection.execute(
        "UPDATE batches SET status = ?, is_open = ?, batch = ? WHERE number = ?",
        (body["status"], body["status"] not in ENDS, orjson.dumps(body), current.number),
    )
    return StoredBatch(current.number, current.owner, body)
