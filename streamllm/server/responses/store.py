"""Responses that are kept: for retrieval, and for the turns that follow them."""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import orjson

from streamllm.server.database import PAGE_BYTES, Database, give_back

_SCHEMA = (
    """
    CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        created_at REAL NOT NULL,
        status TEXT NOT NULL,
        size INTEGER NOT NULL,
        response BLOB NOT NULL,
        input BLOB NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX responses_by_age ON responses (created_at);
    CREATE TABLE response_sizes (total INTEGER NOT NULL);
    INSERT INTO response_sizes VALUES (0)
    """,
)
MAX_TURNS = 10_000
"""Turns of one conversation."""

_ENDED = "The server was stopped before the response was finished."


@dataclass(frozen=True)
class StoredResponse:
    """
    Attributes:
        response: the response as clients see it.
        input: the items of its own request.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]


class ResponseStore:
    """
    Args:
        max_bytes: the oldest go when there are more, counted in whole pages as the file holds them.
        max_age: seconds after which a response goes.
    """

    def __init__(self, database: Database, *, max_bytes: int, max_age: float) -> None:
        database.add_schema("responses", _SCHEMA)
        self._database = database
        self._max_bytes = max_bytes
        self._max_age = max_age

    async def put(self, owner: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response, or what it has become, and forget what is too old or too much.

        Args:
            owner: who may see it.
        """
        stored, own_input = orjson.dumps(response), orjson.dumps(items)
        size = math.ceil((len(stored) + len(own_input)) / PAGE_BYTES) * PAGE_BYTES
        row = (
            response["id"],
            owner,
            response["created_at"],
            response["status"],
            size,
            stored,
            own_input,
        )

        def work(connection: sqlite3.Connection) -> None:
            _remove(connection, "id = ?", response["id"])
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            _add_size(connection, size)
            _remove(connection, "created_at < ?", time.time() - self._max_age)
            self._shrink(connection)

        await self._database.run(work)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response; ``None`` if there is none of that id for this owner."""
        if not self._database.exists:
            return None
        return await self._database.run(lambda connection: self._get(connection, owner, response_id))

    async def conversation(self, owner: str, response_id: str) -> list[dict[str, Any]] | None:
        """The items of a response and of all turns before it, the first one's first; ``None`` if one of them
        is not there (any more)."""
        if not self._database.exists:
            return None

        def work(connection: sqlite3.Connection) -> list[dict[str, Any]] | None:
            turns: list[list[dict[str, Any]]] = []
            current: str | None = response_id
            while current is not None and len(turns) < MAX_TURNS:
                stored = self._get(connection, owner, current)
                if stored is None:
                    return None
                turns.append([*stored.input, *stored.response["output"]])
                current = stored.response["previous_response_id"]
            return [item for turn in reversed(turns) for item in turn]

        return await self._database.run(work)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; returns whether it was there."""
        if not self._database.exists:
            return False
        return await self._database.run(
            lambda connection: _remove(connection, "id = ? AND owner = ?", response_id, owner) > 0
        )

    async def end_unfinished(self, created_before: float) -> None:
        """At start: what another life of the server has not finished has failed."""
        if not self._database.exists:
            return

        def work(connection: sqlite3.Connection) -> None:
            rows = connection.execute(
                "SELECT id, response FROM responses WHERE created_at < ? AND"
                " status IN ('queued', 'in_progress')",
                (created_before,),
            ).fetchall()
            for response_id, stored in rows:
                response = orjson.loads(stored)
                response |= {"status": "failed", "error": {"code": "server_error", "message": _ENDED}}
                connection.execute(
                    "UPDATE responses SET response = ?, status = 'failed' WHERE id = ?",
                    (orjson.dumps(response), response_id),
                )

        await self._database.run(work)

    def _get(self, connection: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse | None:
        row = connection.execute(
            "SELECT response, input FROM responses WHERE id = ? AND owner = ? AND created_at >= ?",
            (response_id, owner, time.time() - self._max_age),
        ).fetchone()
        return StoredResponse(orjson.loads(row[0]), orjson.loads(row[1])) if row else None

    def _shrink(self, connection: sqlite3.Connection) -> None:
        while _total(connection) > self._max_bytes:
            oldest = "id IN (SELECT id FROM responses ORDER BY created_at LIMIT 16)"
            if not _remove(connection, oldest):
                break
        give_back(connection, 256, keep=256)


def _remove(connection: sqlite3.Connection, condition: str, *values: Any) -> int:
    """Remove rows; returns how many there were."""
    count, size = connection.execute(
        f"SELECT count(*), coalesce(sum(size), 0) FROM responses WHERE {condition}", values
    ).fetchone()
    if count:
        connection.execute(f"DELETE FROM responses WHERE {condition}", values)
        _add_size(connection, -size)
    return int(count)


def _add_size(connection: sqlite3.Connection, size: int) -> None:
    connection.execute("UPDATE response_sizes SET total = total + ?", (size,))


def _total(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT total FROM response_sizes").fetchone()[0])
