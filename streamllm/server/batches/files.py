"""Files that clients store, and those that batches write: rows in the database, bytes beside it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamllm.errors import InvalidRequestError
from streamllm.server.batches.paging import select_page
from streamllm.server.database import Database
from streamllm.server.query import Page

_SCHEMA = (
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        size INTEGER NOT NULL,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL
    );
    CREATE INDEX files_by_owner ON files (owner, number)
    """,
)
_COLUMNS = "id, owner, purpose, filename, size, created_at, expires_at"

FORM_BYTES = 2**16
"""What an upload may have around its file."""

ORPHAN_SECONDS = 3600.0
"""Age from which bytes that no row knows are nobody's any more."""


@dataclass(frozen=True)
class StoredFile:
    """
    Attributes:
        size: in bytes.
        created_at, expires_at: Unix times in seconds.
    """

    id: str
    owner: str
    purpose: str
    filename: str
    size: int
    created_at: int
    expires_at: int

    def body(self) -> dict[str, Any]:
        """The file as clients see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class NewFile:
    """A file that is being written; seen by nobody until the store keeps it. Every method blocks.

    Args:
        max_bytes: most that it may hold; ``None`` for no limit.
        reserved: bytes for which the store has room set aside.
    """

    def __init__(self, path: Path, max_bytes: int | None, reserved: int) -> None:
        self.path = path
        self.size = 0
        self.reserved = reserved
        self._max_bytes = max_bytes
        self._file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """
        Raises:
            InvalidRequestError: (413) the file is larger than allowed.
        """
        self.size += len(data)
        if self._max_bytes is not None and self.size > self._max_bytes:
            raise too_large(self._max_bytes)
        self._file.write(data)

    def finish(self) -> None:
        """All is written: see that it stays so."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Remove it, unless it has been kept."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class FileStore:
    """
    Args:
        max_file_bytes: largest file that a client may store.
        max_bytes: most that all files may take; then none is taken any more.
        max_age: seconds after which a file goes.
    """

    def __init__(self, database: Database, *, max_file_bytes: int, max_bytes: int, max_age: float) -> None:
        database.add_schema("files", _SCHEMA)
        self._database = database
        self._folder = database.path.parent / "files"
        self._max_file_bytes = max_file_bytes
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._reserved = 0

    def path(self, file_id: str) -> Path:
        """Where a file's bytes are."""
        return self._folder / file_id

    async def begin_upload(self, announced: int | None) -> NewFile:
        """A file for what a client sends.

        Args:
            announced: bytes of the whole form, if it says so.

        Raises:
            InvalidRequestError: (413) it is too large, or there is no room for it.
        """
        if announced is not None and announced > self._max_file_bytes + FORM_BYTES:
            raise too_large(self._max_file_bytes)
        reserved = min(announced or self._max_file_bytes, self._max_file_bytes)
        self._reserved += reserved
        try:
            await self.remove_expired()
            used = await self._database.run(_total)
            if used + self._reserved > self._max_bytes:
                raise _full(self._max_bytes)
            return await self._begin(self._max_file_bytes, reserved)
        except BaseException:
            self._reserved -= reserved
            raise

    async def begin_output(self) -> NewFile:
        """A file for a batch's results, which are kept however many they are."""
        return await self._begin(None, 0)

    async def end(self, new: NewFile) -> None:
        """A new file is kept or given up."""
        self._reserved -= new.reserved
        new.reserved = 0
        await asyncio.to_thread(new.discard)

    async def describe(
        self, new: NewFile, owner: str, purpose: str, filename: str, expires_after: int | None = None
    ) -> StoredFile:
        """Finish a new file and name it; it is stored when :func:`insert_file` has been run.

        Args:
            expires_after: seconds that it is to be kept, if less than the store keeps any.
        """
        now = int(time.time())
        age = self._max_age if expires_after is None else min(expires_after, self._max_age)
        stored = StoredFile(
            f"file-{uuid.uuid4().hex}", owner, purpose, filename, new.size, now, now + int(age)
        )

        def work() -> None:
            new.finish()
            new.path.rename(self.path(stored.id))

        await asyncio.to_thread(work)
        return stored

    async def insert(self, stored: StoredFile) -> None:
        """Store a described file."""
        await self._database.run(lambda connection: insert_file(connection, stored))

    async def get(self, owner: str, file_id: str) -> StoredFile | None:
        """A file; ``None`` if there is none of that id for this owner."""
        if not self._database.exists:
            return None

        def work(connection: sqlite3.Connection) -> StoredFile | None:
            row = connection.execute(
                f"SELECT {_COLUMNS} FROM files WHERE id = ? AND owner = ? AND expires_at > ?",
                (file_id, owner, time.time()),
            ).fetchone()
            return StoredFile(*row) if row else None

        return await self._database.run(work)

    async def select(self, owner: str, page: Page, purpose: str | None) -> tuple[list[StoredFile], bool]:
        """A page of an owner's files, and whether there are more.

        Raises:
            InvalidRequestError: ``page.after`` names none of them.
        """
        if not self._database.exists and page.after is None:
            return [], False
        await self.remove_expired()
        where = {"owner": owner} | ({} if purpose is None else {"purpose": purpose})
        rows, has_more = await self._database.run(
            lambda connection: select_page(connection, "files", _COLUMNS, page, where)
        )
        return [StoredFile(*row) for row in rows], has_more

    async def delete(self, file_id: str) -> None:
        """
        Raises:
            InvalidRequestError: (409) a batch that has not ended reads it.
        """

        def work(connection: sqlite3.Connection) -> None:
            row = connection.execute(
                "SELECT id FROM batches WHERE input_file = ? AND is_open LIMIT 1", (file_id,)
            ).fetchone()
            if row is not None:
                raise InvalidRequestError(
                    f"{file_id[:100]} is read by the batch {row[0]}; cancel it first.",
                    param="id",
                    status=409,
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._database.run(work)
        await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def remove_expired(self) -> None:
        """Forget what is too old, but for the input of batches that have not ended."""

        def work(connection: sqlite3.Connection) -> list[str]:
            condition = "expires_at <= ? AND id NOT IN (SELECT input_file FROM batches WHERE is_open)"
            now = time.time()
            found = connection.execute(f"SELECT id FROM files WHERE {condition}", (now,)).fetchall()
            if found:
                connection.execute(f"DELETE FROM files WHERE {condition}", (now,))
            return [row[0] for row in found]

        for file_id in await self._database.run(work):
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    async def remove_orphans(self) -> None:
        """Remove bytes that a server left behind when it was killed between disk and database."""

        def old_names() -> list[str]:
            if not self._folder.exists():
                return []
            before = time.time() - ORPHAN_SECONDS
            return [entry.name for entry in os.scandir(self._folder) if entry.stat().st_mtime < before]

        def unknown(connection: sqlite3.Connection) -> list[str]:
            query = "SELECT 1 FROM files WHERE id = ?"
            return [name for name in names if connection.execute(query, (name,)).fetchone() is None]

        if names := await asyncio.to_thread(old_names):
            for name in await self._database.run(unknown):
                await asyncio.to_thread((self._folder / name).unlink, missing_ok=True)

    async def _begin(self, max_bytes: int | None, reserved: int) -> NewFile:
        def work() -> NewFile:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return NewFile(self._folder / f"{uuid.uuid4().hex}.part", max_bytes, reserved)

        return await asyncio.to_thread(work)


def insert_file(connection: sqlite3.Connection, stored: StoredFile) -> None:
    """Store a described file, as a part of a transaction."""
    connection.execute(
        f"INSERT INTO files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (stored.id, stored.owner, stored.purpose, stored.filename, stored.size, stored.created_at,
         stored.expires_at),
    )  # fmt: skip


def too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"file is too large: at most {max_bytes} bytes are allowed (--max-file-bytes).",
        param="file",
        code="file_too_large",
        status=413,
    )


def _full(max_bytes: int) -> InvalidRequestError:
    # 507 would say it better, but clients repeat what is answered with 5xx.
    return InvalidRequestError(
        f"There is no room for the file: all files together may take {max_bytes} bytes "
        "(--store-max-file-bytes). Delete some.",
        param="file",
        code="storage_full",
        status=413,
    )


def _total(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(sum(size), 0) FROM files").fetchone()[0])
