"""``streamllm serve --replicas N`` as a user starts it, on a Ray cluster of its own."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import httpx
from helpers.live_server import LiveServer

ENGINE = "ray::ServeReplica:streamllm:engine"


class LiveReplicas(LiveServer):
    """Starts and waits until all replicas are there.

    Attributes:
        headers: sent with each question to the server itself.
    """

    def __init__(self, num_replicas: int, *flags: str, headers: dict[str, str] | None = None) -> None:
        super().__init__("--replicas", str(num_replicas), *flags, timeout=240.0)
        self.num_replicas = num_replicas
        self.headers = headers or {}

    def __enter__(self) -> LiveReplicas:
        super().__enter__()
        self.wait_for_all()
        return self

    def text(self, path: str) -> str:
        return httpx.get(self.url + path, headers=self.headers, timeout=30.0).text

    def replica_ids(self) -> set[str]:
        """Those that answer."""
        return set(re.findall(r'num_requests_running\{replica="([^"]+)"', self.text("/metrics")))

    def wait_for_all(self, seconds: float = 120.0) -> set[str]:
        """Until all replicas answer. Returns their ids."""
        deadline = time.monotonic() + seconds
        while len(ids := self.replica_ids()) < self.num_replicas:
            assert time.monotonic() < deadline, f"only {ids} after {seconds} s"
            time.sleep(0.2)
        return ids

    def sum_of(self, name: str) -> float:
        """A metric of all replicas together."""
        pattern = rf"^streamllm:{name}(?:\{{[^}}]*\}})? (\S+)$"
        return sum(map(float, re.findall(pattern, self.text("/metrics/sum"), re.MULTILINE)))

    def engine_processes(self) -> list[int]:
        """Of this server's replicas: those that descend from its process."""
        return [pid for pid in _descendants(self.process.pid) if _command(pid).startswith(ENGINE)]

    def kill_replica(self) -> None:
        os.kill(self.engine_processes()[0], signal.SIGKILL)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            children = [int(child) for child in path.read_text().split()]
            found += children
            waiting += children
    return found
