"""The store of responses: bounded, also as a file."""

from __future__ import annotations

import sqlite3
import time

import pytest

from streamllm.server.database import PAGE_BYTES, Database, give_back
from streamllm.server.responses.store import ResponseStore


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path / "server.sqlite")
    yield database
    database.close()


def response(number: int, created_at: float) -> dict:
    return {"id": f"resp_{number}", "created_at": created_at, "status": "completed", "output": []}


def items(size: int) -> list[dict]:
    return [{"type": "message", "role": "user", "content": "x" * size}]


async def test_the_oldest_go_and_the_file_stays_within_the_bound(database):
    bound = 100 * PAGE_BYTES
    store = ResponseStore(database, max_bytes=bound, max_age=1e6)
    begin = time.time() - 1000
    for number in range(400):
        await store.put("", response(number, begin + number), items(2500))
    kept = [number for number in range(400) if await store.get("", f"resp_{number}") is not None]
    assert kept == list(range(kept[0], 400)) and 80 <= len(kept) <= 100
    pages = await database.run(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0])
    assert pages * PAGE_BYTES < 1.5 * bound


async def test_one_that_is_larger_than_everything_is_not_kept(database):
    store = ResponseStore(database, max_bytes=10 * PAGE_BYTES, max_age=1e6)
    await store.put("", response(1, time.time()), items(100_000))
    assert await store.get("", "resp_1") is None


async def test_what_is_too_old_is_gone(database):
    store = ResponseStore(database, max_bytes=10**9, max_age=100.0)
    await store.put("", response(1, time.time() - 99), items(10))
    assert await store.get("", "resp_1") is not None
    await store.put("", response(2, time.time() - 101), items(10))
    assert await store.get("", "resp_2") is None


async def test_a_bound_that_was_lowered_makes_the_file_smaller(tmp_path):
    async def size_after(max_bytes: int, numbers: range, item_size: int) -> int:
        database = Database(tmp_path / "server.sqlite")
        store = ResponseStore(database, max_bytes=max_bytes, max_age=1e6)
        for number in numbers:
            await store.put("", response(number, time.time() - 1000 + number), items(item_size))
        database.close()
        return database.path.stat().st_size

    large = await size_after(10**9, range(600), 6000)
    assert await size_after(20 * PAGE_BYTES, range(600, 610), 10) < large / 2


def test_pages_are_given_back(tmp_path):
    connection = sqlite3.connect(tmp_path / "file")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("CREATE TABLE t (a)")
    connection.executemany("INSERT INTO t VALUES (?)", [(b"x" * 9000,)] * 100)
    connection.execute("DELETE FROM t")

    def free() -> int:
        return connection.execute("PRAGMA freelist_count").fetchone()[0]

    before = free()
    give_back(connection, 50)
    assert free() == before - 50
    give_back(connection, 10**6, keep=7)
    assert free() == 7
    connection.close()
