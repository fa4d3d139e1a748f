"""Thousands of stored responses: the server's memory stays as it is, and its files within their bound."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from helpers.live_server import LiveServer

NUM_RESPONSES, WARM_UP = 5000, 1000
BOUND = 4 * 2**20
BODY = {"input": "Hi", "max_output_tokens": 1, "metadata": {str(i): "x" * 500 for i in range(4)}}
"""Some 3.5 KB stored, a page of 4 KiB: five times the bound in all."""


def memory(server: LiveServer) -> int:
    """Resident bytes of the server's process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def store(server: LiveServer, count: int, folder: Path) -> tuple[list[str], int]:
    """The ids of ``count`` new responses in order, and the most that the folder has held meanwhile."""
    ids: list[str] = []
    largest = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def one() -> str:
            answer = await client.post("/v1/responses", json=BODY)
            assert answer.status_code == 200
            return answer.json()["id"]

        while len(ids) < count:
            ids += await asyncio.gather(*(one() for _ in range(20)))
            largest = max(largest, size(folder))
    return ids, largest


@pytest.mark.slow
async def test_memory_is_flat_and_files_are_bounded(tmp_path):
    with LiveServer(
        "--data-dir", str(tmp_path), "--store-max-bytes", str(BOUND), "--access-log", "off"
    ) as server:
        first, _ = await store(server, WARM_UP, tmp_path)
        before = memory(server)
        last, largest = await store(server, NUM_RESPONSES - WARM_UP, tmp_path)
        growth = memory(server) - before
        # SQLite's log beside the database takes up to 4 MiB before it is written back.
        assert largest < 1.5 * BOUND + 5 * 2**20, f"{largest / 2**20:.1f} MiB on disk"
        assert growth < 8 * 2**20, f"memory grew by {growth / 2**20:.1f} MiB"
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get(f"/v1/responses/{first[0]}")).status_code == 404
            assert (await client.get(f"/v1/responses/{last[-1]}")).status_code == 200
        server.wait_until_quiet()
