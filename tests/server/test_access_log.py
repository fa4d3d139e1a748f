"""What is logged about a request, and what an answer says about its own times."""

from __future__ import annotations

import http.client
import io
import json
import logging
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from serving import run_server

from streamllm.server import access_log

BODY = {"prompt": "abc", "max_tokens": 6}


@pytest.fixture
def lines(caplog):
    """The access log's lines so far, as they would be printed."""
    caplog.set_level(logging.INFO, logger="streamllm.access")

    def read(server=None):
        if server is not None:
            server.wait_idle()
        return [record.getMessage() for record in caplog.records if record.name == "streamllm.access"]

    return read


def wait_for_lines(server, lines, count):
    server.wait_for(lambda: len(lines()) >= count)
    return lines()


def test_a_line_of_json_a_request(lines):
    with run_server(access_log="json") as server:
        headers = {"X-Request-Id": "mine"}
        httpx.post(server.url + "/v1/completions?key=secret", json=BODY, headers=headers)
        httpx.post(server.url + "/v1/completions", json={**BODY, "stream": True, "n": 2})
        httpx.post(server.url + "/v1/completions", json={"prompt": ""})
        httpx.get(server.url + "/health")
        whole, streamed, refused, health = map(json.loads, wait_for_lines(server, lines, 4))
    assert whole["request_id"] == "mine" and whole["client"] == "127.0.0.1"
    assert (whole["method"], whole["path"], whole["status"]) == ("POST", "/v1/completions", 200)
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (3, 6)
    assert 0 <= whole["queue_time_ms"] <= whole["time_to_first_token_ms"] <= whole["duration_ms"]
    assert streamed["completion_tokens"] == 12 and streamed["bytes"] > 500 and streamed["complete"]
    assert len(streamed["request_id"]) == 32
    assert refused["status"] == 400 and "prompt_tokens" not in refused
    assert health["path"] == "/health"


def test_a_stream_that_is_left_is_incomplete(lines):
    with run_server(access_log="json", step_seconds=0.005) as server:
        body = {"prompt": "a", "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            next(response.iter_bytes())
        (line,) = map(json.loads, wait_for_lines(server, lines, 1))
        assert not line["complete"] and 0 < line["completion_tokens"] < 3000


@pytest.mark.parametrize("style", ["plain", "json"])
def test_nothing_of_the_clients_reaches_the_log_unescaped(lines, style):
    hostile = "/v1/%0a%0d%1b[31mred%1b[0m%c2%9b31m%e2%80%a8%22%7d%7b" + "x" * 2000
    with run_server(access_log=style) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("GET", hostile, headers={"X-Request-Id": 'a"b\xff é'.encode()})
        connection.getresponse().read()
        (line,) = wait_for_lines(server, lines, 1)
    assert line.isascii() and line.isprintable() and len(line) < 1500
    if style == "json":
        assert json.loads(line)["path"].startswith("/v1/\n\r\x1b[31m")
    else:
        assert " 404 " in line


def test_plain_lines_paths_left_out_and_no_log_at_all(lines):
    with run_server(disable_access_log_for_endpoints=("/health,/metrics",)) as server:
        server.post("/v1/completions", BODY)
        httpx.get(server.url + "/health")
        httpx.get(server.url + "/version")
        completion, version = wait_for_lines(server, lines, 2)
        assert '127.0.0.1 POST "/v1/completions" 200' in completion and completion.endswith("3+6 tokens")
        assert '"/version" 200' in version
    for off in ({"access_log": "off"}, {"disable_uvicorn_access_log": True}):
        with run_server(**off) as server:
            server.post("/v1/completions", BODY)
    assert len(lines()) == 2


def test_the_log_goes_to_standard_output_alone(monkeypatch):
    # Not capsys: what another thread prints while it is being read may be lost.
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr(access_log, "logger", logging.getLogger("streamllm.access.test"))
    access_log.log_to_stdout()
    access_log.logger.info("a line")
    deadline = time.monotonic() + 5
    while not output.getvalue() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (output.getvalue(), errors.getvalue()) == ("a line\n", "")


def test_a_terminal_that_takes_nothing_holds_up_nobody(monkeypatch):
    release = threading.Event()
    blocked = SimpleNamespace(write=lambda text: release.wait(10), flush=lambda: None)
    monkeypatch.setattr(access_log, "logger", logging.getLogger("streamllm.access.blocked"))
    monkeypatch.setattr(access_log, "MAX_WAITING_LINES", 100)
    monkeypatch.setattr("sys.stdout", blocked)
    access_log.log_to_stdout()
    began = time.monotonic()
    for _ in range(1000):
        access_log.logger.info("a line")
    assert time.monotonic() - began < 2
    release.set()


# -- times in the answer -----------------------------------------------------------------------------------


def test_an_answer_has_its_times_where_the_server_gives_them():
    with run_server(enable_per_request_metrics=True, step_seconds=0.005) as server:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 11}
        for path, body in (("/v1/completions", {**BODY, "max_tokens": 11}), ("/v1/chat/completions", chat)):
            times = server.post(path, body).json()["metrics"]
            assert times["queue_time_ms"] >= 0 and times["prefill_time_ms"] >= 5
            assert times["time_to_first_token_ms"] >= times["prefill_time_ms"]
            assert times["generation_time_ms"] >= 50
            assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 10, abs=0.01)
            assert 0 < times["tokens_per_second"] < 200
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            *_, last, done = [line[6:] for line in server.post(path, streamed).text.split("\n\n") if line]
            assert set(json.loads(last)["metrics"]) == set(times) and done == "[DONE]"
        one = server.post("/v1/completions", {**BODY, "max_tokens": 1}).json()["metrics"]
        assert one["mean_itl_ms"] is None and one["generation_time_ms"] == 0


def test_an_answer_has_no_times_by_default(server):
    assert "metrics" not in server.post("/v1/completions", BODY).json()
