"""`streamllm serve` as a user starts it: a process of its own, spoken to over HTTP."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time

import httpx


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class LiveServer:
    """Starts the server and waits until it is healthy; a context manager that stops it by SIGTERM.

    Attributes:
        url: base URL without ``/v1``.
        exit_code: after leaving the context.
    """

    def __init__(self, *flags: str, timeout: float = 90.0) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "streamllm.cli.main", "serve"]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        self._timeout = timeout
        self.exit_code: int | None = None

    def new_client(self) -> httpx.Client:
        """For requests by their paths."""
        return httpx.Client(base_url=self.url)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> LiveServer:
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                with self.new_client() as client:
                    if client.get("/health").status_code == 200:
                        return self
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                raise RuntimeError(f"the server did not start: {self.process.communicate()[1]}")
            time.sleep(0.05)

    def __exit__(self, *exception: object) -> None:
        self.send_signal(signal.SIGTERM)
        try:
            self.stderr = self.process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self.stderr = self.process.communicate()[1]
        self.exit_code = self.process.returncode

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, by its name without prefix."""
        text = httpx.get(f"{self.url}/metrics").text
        pattern = rf"^streamllm:{name}(?:\{{[^}}]*\}})? (\S+)$"
        values = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_until_quiet(self, seconds: float = 1.0) -> None:
        """Nothing running, nothing waiting, no block in use, within ``seconds``."""
        deadline = time.monotonic() + seconds
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(values := [self.metric(name) for name in names]):
            assert time.monotonic() < deadline, f"still busy after {seconds} s: {values}"
            time.sleep(0.02)
