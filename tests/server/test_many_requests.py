"""Thousands of requests, good, bad and cut off: nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from test_run import Process

# The fake model remembers every batch and sequence; a server's memory is measured here, not the fake's.
FORGETFUL = """
import collections
class Nothing(collections.Counter):
    def __setitem__(self, key, value):
        pass
executor.runner.batches = collections.deque(maxlen=2)
executor.runner.num_drawn = Nothing()
executor.step_seconds = 0
"""


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def send(url: str, count: int) -> None:
    """A third good, a third bad, a third cut off; half of them streamed."""

    async def one(client: httpx.AsyncClient, index: int) -> None:
        body = {"prompt": "x" * (index % 40 + 1), "max_tokens": index % 9 + 1, "stream": index % 2 == 0}
        if index % 3 == 0:
            body["temperature"] = "hot"
        timeout = 0.001 + index % 7 / 1000 if index % 3 == 1 else 30
        with contextlib.suppress(httpx.TimeoutException):
            response = await client.post("/v1/completions", json=body, timeout=timeout)
            assert response.status_code == (400 if index % 3 == 0 else 200)

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=16)) as client:
        for start in range(0, count, 200):
            await asyncio.gather(*(one(client, start + index) for index in range(200)))


@pytest.mark.slow
async def test_memory_is_flat_over_ten_thousand_requests():
    server = Process(fault=FORGETFUL, access_log="off")
    pid = server.process.pid
    descriptors = num_descriptors(pid)
    await send(server.url, 20_000)  # until the histories of steps and requests hold as many as they may
    before = memory(pid)
    await send(server.url, 10_000)
    assert memory(pid) < 1.02 * before, (before, memory(pid))
    async with httpx.AsyncClient(base_url=server.url) as client:
        load = (await client.get("/load")).json()
    assert load == {"server_load": 0, "num_running": 0, "num_waiting": 0}
    await asyncio.sleep(0.5)
    assert num_descriptors(pid) <= descriptors + 1
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("st") is None, reason="needs schemathesis")
def test_no_request_that_the_document_allows_or_forbids_is_the_servers_fault():
    server = Process(fault=FORGETFUL, access_log="off", trust_request_chat_template=True)
    canary = {"prompt": "canary", "temperature": 0, "max_tokens": 20}
    before = httpx.post(server.url + "/v1/completions", json=canary).json()["choices"]
    checks = "not_a_server_error,response_schema_conformance,unsupported_method"
    command = ["st", "run", server.url + "/openapi.json", "--checks", checks, "--request-timeout", "10"]
    run = subprocess.run([*command, "-n", "100", "--seed", "1"], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:]
    assert httpx.post(server.url + "/v1/completions", json=canary).json()["choices"] == before
    assert httpx.get(server.url + "/load").json()["server_load"] == 0
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
