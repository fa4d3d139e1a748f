"""What a server keeps beyond its requests, and beyond its own life: one SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from streamllm.errors import ConfigError

if TYPE_CHECKING:
    from streamllm.config import ServerConfig

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

BUSY_SECONDS = 10.0
"""How long another process's transaction is waited for."""

PAGE_BYTES = 4096
"""What the file grows by, and what a row that does not fit among others takes at least."""


class Database:
    """A file that is made when something is first kept in it. All work runs on one thread of its own, so that
    the event loop never waits for a disk.

    Args:
        path: of the file; its folder is made with it, for this user alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._schemas: dict[str, Sequence[str]] = {}
        self._thread = ThreadPoolExecutor(1, "streamllm-database")
        self._connection: sqlite3.Connection | None = None

    @property
    def exists(self) -> bool:
        """Whether anything may have been kept yet."""
        return self._connection is not None or self.path.exists()

    def add_schema(self, name: str, migrations: Sequence[str]) -> None:
        """Declare a part's tables, before any work.

        Args:
            name: of the part.
            migrations: SQL scripts, of which those run that have not yet; only ever extended.
        """
        self._schemas[name] = migrations

    async def run(self, work: Work[T]) -> T:
        """What ``work`` returns, which runs in a transaction.

        Raises:
            sqlite3.Error, OSError: the file cannot be read or written.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def close(self) -> None:
        """Wait for the work that runs, and close the file."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=True)

    def _run(self, work: Work[T]) -> T:
        if self._connection is None:
            self._connection = self._open()
        with self._connection:
            return work(self._connection)

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("CREATE TABLE IF NOT EXISTS schemas (name TEXT PRIMARY KEY, version INTEGER)")
            for name, migrations in self._schemas.items():
                _migrate(connection, name, migrations)
        except BaseException:
            connection.close()
            raise
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()


def give_back(connection: sqlite3.Connection, pages: int, *, keep: int = 0) -> None:
    """Return some of the file's free pages to the disk.

    Args:
        pages: at most.
        keep: free pages that stay for what comes next.
    """
    free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
    for _ in range(min(free - keep, pages)):
        # One at a time: of a statement without columns Python takes the first step only.
        connection.execute("PRAGMA incremental_vacuum(1)")


def _migrate(connection: sqlite3.Connection, name: str, migrations: Sequence[str]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        row = connection.execute("SELECT version FROM schemas WHERE name = ?", (name,)).fetchone()
        version = row[0] if row else 0
        for script in migrations[version:]:
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
        connection.execute("INSERT OR REPLACE INTO schemas VALUES (?, ?)", (name, len(migrations)))


def data_folder(config: ServerConfig) -> Path:
    """Where a server keeps its files: ``--data-dir``, or a folder for its port in the user's state.

    Raises:
        ConfigError: ``--data-dir`` is something else than a folder.
    """
    if config.data_dir is not None:
        folder = Path(config.data_dir).expanduser()
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--data-dir {folder} is not a folder.")
        return folder
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    name = str(config.port) if config.uds is None else config.uds.strip("/").replace("/", "-")
    return Path(state).expanduser() / "streamllm" / name
