"""``serve`` as a process: signals and exit codes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent

PROGRAM = """
import logging, socket, sys
sys.path[:0] = {paths!r}
from serving import make_engine
from streamllm.config import ServerConfig
from streamllm.server.run import serve

logging.basicConfig(level=logging.INFO)
engine, executor = make_engine(step_seconds=0.005, max_num_seqs=1)
if {dies!r}:
    executor.fail_next = [RuntimeError("a broken kernel")] * 100
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
code = serve(lambda: engine, ServerConfig(shutdown_timeout={timeout!r}), sock)
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""


class Process:
    def __init__(self, *, timeout: float = 30.0, dies: bool = False) -> None:
        paths = [str(HERE), str(HERE.parent)]
        program = PROGRAM.format(paths=paths, timeout=timeout, dies=dies)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health").status_code == 200:
                    break
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)

    def stream(self, max_tokens: int) -> tuple[threading.Thread, list[str]]:
        """A streaming client in a thread; its events so far."""
        events: list[str] = []

        def read() -> None:
            body = {"prompt": "a", "max_tokens": max_tokens, "stream": True}
            with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=20) as response:
                events.extend(["started"])
                events.extend(line[6:] for line in response.iter_lines() if line)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        while not events:
            time.sleep(0.01)
        return thread, events

    def end(self, timeout: float = 10.0) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(sent):
    server = Process()
    running, running_events = server.stream(100)
    queued, queued_events = server.stream(5)
    server.process.send_signal(sent)
    code, errors = server.end()
    running.join(5)
    queued.join(5)
    assert code == 0, errors
    assert "Traceback" not in errors
    for events in (running_events, queued_events):
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # the port is free


def test_a_second_signal_ends_streams_at_once():
    server = Process()
    client, events = server.stream(4000)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    server.process.send_signal(signal.SIGTERM)
    code, errors = server.end(timeout=3)
    client.join(5)
    assert code == 0, errors
    assert "shutting down" in json.loads(events[-2])["error"]["message"]


def test_death_of_the_engine_exits_with_1():
    server = Process(dies=True)
    answers = []
    while not answers or answers[-1] != 503:
        answers.append(httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code)
    assert set(answers) == {500, 503}
    code, errors = server.end()
    assert code == 1
    assert "the engine died" in errors
