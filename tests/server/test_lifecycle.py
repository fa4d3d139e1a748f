"""Clients that go away, requests that fail, engines that die, servers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time

import httpx
import openai
import pytest
from serving import run_server

LONG = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow():
    """A server with steps of 5 ms and room for two sequences."""
    with run_server(step_seconds=0.005, max_num_seqs=2) as server:
        yield server


def running(server):
    return server.stats().num_running


def waiting(server):
    return server.stats().num_waiting


class Background:
    """A POST in a thread, whose connection can be cut at any time."""

    def __init__(self, server, body, path="/v1/completions"):
        self.client = httpx.Client(timeout=10)
        self.response = None
        self.lines = []
        self._thread = threading.Thread(target=self._run, args=(server.url + path, body), daemon=True)
        self._thread.start()

    def _run(self, url, body):
        stream = self.client.stream("POST", url, json=body)
        with contextlib.suppress(httpx.HTTPError), stream as self.response:
            for line in self.response.iter_lines():
                self.lines.append(line)

    def join(self, timeout=10.0):
        self._thread.join(timeout)
        assert not self._thread.is_alive()

    @property
    def events(self):
        return [line[6:] for line in self.lines if line]


# -- disconnects -------------------------------------------------------------------------------------------


def test_closing_a_stream_stops_generation(slow):
    with httpx.stream("POST", slow.url + "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        assert running(slow) == 1
    slow.wait_idle()
    before = slow.stats().generation_tokens
    time.sleep(0.1)
    assert slow.stats().generation_tokens == before
    slow.canary()


@pytest.mark.parametrize("fields", [{}, {"n": 8}, {"prompt": ["a", "b", "c"]}])
def test_leaving_a_whole_answer_stops_generation(slow, fields):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(slow.url + "/v1/completions", json={**LONG, **fields}, timeout=0.2)
    slow.wait_idle()
    slow.canary()


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue(slow, stream):
    with httpx.stream(
        "POST", slow.url + "/v1/completions", json={**LONG, "n": 2, "stream": True}
    ) as response:
        lines = response.iter_lines()  # closes the response when it is collected
        next(lines)
        prompt_tokens = slow.stats().prompt_tokens
        body = {**LONG, "prompt": "queued", "stream": stream}
        queued = httpx.stream("POST", slow.url + "/v1/completions", json=body, timeout=0.2)
        with pytest.raises(httpx.ReadTimeout), queued as answer:
            list(answer.iter_lines())
        slow.wait_for(lambda: waiting(slow) == 0, 1.0)
        assert slow.stats().prompt_tokens == prompt_tokens
        assert running(slow) == 2
    slow.wait_idle()


def test_two_hundred_clients_cut_off(slow):
    async def cut(client, index):
        body = {**LONG, "prompt": "x" * (index % 150 + 1), "stream": index % 2 == 0}
        with contextlib.suppress(httpx.HTTPError, asyncio.TimeoutError):
            await asyncio.wait_for(
                client.post(slow.url + "/v1/completions", json=body), 0.02 + index % 40 / 100
            )

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=10, limits=limits) as client:
            await asyncio.gather(*(cut(client, index) for index in range(200)))

    asyncio.run(all_of_them())
    slow.wait_idle()
    slow.canary()


# -- failures ----------------------------------------------------------------------------------------------


def fail_steps(server, count=1):
    server.executor.fail_next.extend(RuntimeError("a broken kernel") for _ in range(count))


def test_a_failure_in_mid_stream_is_one_error_event(slow):
    client = openai.OpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="fake-model", prompt="a", max_tokens=3000, stream=True)
    next(iter(stream))
    fail_steps(slow)
    with pytest.raises(openai.APIError) as failure:
        for _ in stream:
            pass
    assert "the model failed" in failure.value.message

    background = Background(slow, {**LONG, "stream": True})
    slow.wait_for(lambda: len(background.lines) > 4)
    fail_steps(slow)
    background.join()
    *_, error, done = background.events
    assert done == "[DONE]" and set(json.loads(error)) == {"error"}
    assert sum("error" in json.loads(event) for event in background.events[:-1]) == 1
    slow.canary()


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_failure_of_a_whole_answer_is_500(slow, prompt):
    background = Background(slow, {**LONG, "prompt": prompt})
    slow.wait_for(lambda: running(slow) > 0)
    fail_steps(slow)
    background.join()
    assert background.response.status_code == 500
    assert json.loads(background.lines[0])["error"]["type"] == "server_error"
    slow.canary()


def test_a_bad_prompt_in_a_batch_leaves_nothing_queued(slow):
    response = slow.post("/v1/completions", {**LONG, "prompt": ["a", "b", ""]})
    assert response.status_code == 400
    slow.canary()


def test_death_of_the_engine():
    with run_server(step_seconds=0.005) as server:
        streamed, whole = Background(server, {**LONG, "stream": True}), Background(server, LONG)
        server.wait_for(lambda: running(server) == 2 and bool(streamed.lines))
        fail_steps(server, 20)
        later = []
        while server.engine.dead_error is None:
            later.append(Background(server, LONG))
            time.sleep(0.02)
        streamed.join()
        whole.join()
        assert "error" in json.loads(streamed.events[-2]) and streamed.events[-1] == "[DONE]"
        assert whole.response.status_code in (500, 503)
        assert httpx.get(server.url + "/health").status_code == 503
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "server_error"
        assert server.post("/v1/completions", {"prompt": "a", "stream": True}).status_code == 503
        server.join()
        assert server.server.engine_died


# -- the end -----------------------------------------------------------------------------------------------


def test_running_requests_finish_after_a_signal():
    with run_server(step_seconds=0.005, shutdown_timeout=10.0) as server:
        streamed = Background(server, {**LONG, "max_tokens": 100, "stream": True})
        whole = Background(server, {**LONG, "max_tokens": 100})
        idle = httpx.Client()
        idle.get(server.url + "/health")
        server.wait_for(lambda: running(server) == 2)
        server.server.handle_exit(15, None)
        server.join()
        assert json.loads(streamed.events[-2])["choices"][0]["finish_reason"] == "length"
        assert whole.response.status_code == 200
        with pytest.raises(httpx.HTTPError):
            idle.get(server.url + "/health")
        assert not server.server.engine_died


@pytest.mark.parametrize("second_signal", [False, True])
def test_requests_end_with_an_error_when_time_is_over(second_signal):
    timeout = 30.0 if second_signal else 0.3
    with run_server(step_seconds=0.005, max_num_seqs=2, shutdown_timeout=timeout) as server:
        streamed, whole = Background(server, {**LONG, "stream": True}), Background(server, LONG)
        server.wait_for(lambda: running(server) == 2 and bool(streamed.lines))
        queued = Background(server, {**LONG, "stream": True})
        server.wait_for(lambda: waiting(server) == 1)
        server.server.handle_exit(15, None)
        if second_signal:
            time.sleep(0.3)
            server.server.handle_exit(15, None)
        server.join(3.0)
        for background in (streamed, queued):
            background.join()
            error, done = background.events[-2:]
            assert "shutting down" in json.loads(error)["error"]["message"] and done == "[DONE]"
        whole.join()
        assert whole.response.status_code == 503
        assert server.is_idle()
