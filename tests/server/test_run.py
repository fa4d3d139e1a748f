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
{fault}
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
code = serve(lambda: engine, ServerConfig(**{settings!r}), sock)
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(code)
"""


DYING = 'executor.fail_next = [RuntimeError("a broken kernel")] * 100'

# The first step is the warm-up's.
STUCK_STEP = """
import asyncio
submit = executor.submit
def submit_or_hang(batch):
    step = submit(batch)
    if len(executor.runner.batches) > 1:
        step.output = lambda: asyncio.sleep(1000)
    return step
executor.submit = submit_or_hang
"""
STUCK_END = (
    STUCK_STEP
    + """
import time
executor.close = lambda: time.sleep(1000)
"""
)
STUCK_LOOP = """
import time
engine.on_request_finished(lambda record: record.num_generation_tokens == 2 and time.sleep(1000))
"""


class Process:
    """A server in a process of its own; ``fault`` is code that breaks its engine."""

    def __init__(self, *, fault: str = "", **settings: object) -> None:
        paths = [str(HERE), str(HERE.parent)]
        program = PROGRAM.format(paths=paths, settings=settings, fault=fault)
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
    server = Process(fault=DYING)
    answers = []
    while not answers or answers[-1] != 503:
        answers.append(httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code)
    assert set(answers) == {500, 503}
    code, errors = server.end()
    assert code == 1
    assert "the engine died" in errors


def post_in_thread(server: Process, body: dict) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def post() -> None:
        with contextlib.suppress(httpx.HTTPError):
            answers.append(httpx.post(server.url + "/v1/completions", json=body, timeout=20))

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    return thread, answers


def test_new_requests_get_503_while_the_server_drains():
    server = Process()
    assert httpx.get(server.url + "/ready").status_code == 200
    client, events = server.stream(400)
    idle = httpx.Client(base_url=server.url)
    idle.get("/health")
    server.process.send_signal(signal.SIGTERM)
    while httpx.get(server.url + "/ready").status_code == 200:
        time.sleep(0.01)
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 30
    assert "shutting down" in answer.json()["error"]["message"]
    streamed = {"prompt": "a", "stream": True}
    assert httpx.post(server.url + "/v1/completions", json=streamed).status_code == 503
    assert idle.get("/ready").status_code == 503
    assert httpx.get(server.url + "/health").status_code == 200
    code, errors = server.end()
    client.join(5)
    assert code == 0, errors
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("fault", [STUCK_STEP, STUCK_END])
def test_a_step_that_never_returns(fault, monkeypatch):
    server = Process(fault=fault + "import streamllm.server.run as r; r.LAST_RESORT = 1.0", step_timeout=0.5)
    running, answers = post_in_thread(server, {"prompt": "a", "max_tokens": 5})
    queued, queued_answers = post_in_thread(server, {"prompt": "a", "max_tokens": 5})
    running.join(5)
    queued.join(5)
    for (answer,) in (answers, queued_answers):
        assert answer.status_code == 503
        assert "no step has finished for 0.5 s" in answer.json()["error"]["message"]
    assert httpx.get(server.url + "/health").status_code == 503
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code == 503
    code, errors = server.end(timeout=15)
    assert code == 1 and "the engine died" in errors
    # What then still holds up the end is shown.
    assert ("most recent call first" in errors) == (fault is STUCK_END)


def test_an_event_loop_that_stands_still():
    server = Process(fault=STUCK_LOOP, watchdog_timeout=1.5)
    client, _ = post_in_thread(server, {"prompt": "a", "max_tokens": 2})
    began = time.monotonic()
    code, errors = server.end(timeout=10)
    client.join(5)
    assert code == 1 and time.monotonic() - began > 1
    assert "most recent call first" in errors and "in _on_finished" in errors


def test_the_watchdog_lets_a_living_server_be():
    server = Process(watchdog_timeout=1.5)
    client, events = server.stream(700)  # 3.5 s
    client.join(10)
    assert events[-1] == "[DONE]"
    server.process.send_signal(signal.SIGTERM)
    code, errors = server.end()
    assert code == 0 and "most recent call" not in errors
