"""What a client may send, how long it may take, and what it costs the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import openai
import pytest
from serving import MODEL, run_server
from test_errors import check_error

from streamllm.server import http_protocol

LONG = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True}


def exchange(server, *pieces: bytes, pause: float = 0.0) -> bytes:
    """What the server answers to raw bytes, up to the end of the connection or a quiet second."""
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=1.5) as connection:
        answer = b""
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
            while data := connection.recv(65536):
                answer += data
        return answer


def parsed(answer: bytes) -> tuple[int, dict]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# -- HTTP itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"CONNECT example.com:443 HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_openais_shape(server, request_bytes):
    status, body = parsed(exchange(server, request_bytes))
    assert status in (400, 404, 405)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    server.canary()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % n for n in range(300)),
        b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x: " + b"a" * 700 + b"\r\n" + (b"y: " + b"b" * 1000 + b"\r\n") * 70,
    ],
)
def test_large_headers_are_refused(server, head):
    status, body = parsed(exchange(server, head, b"\r\n\r\n"))
    assert status == 431 and "65536 bytes" in body["error"]["message"]
    server.canary()


@pytest.mark.parametrize("start", [b"GET /", b"GET /health HTTP/1.1\r\nx: "])
def test_a_line_that_never_ends_is_cut_off(server, start):
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(start)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * 65536)
    server.canary()


def test_endless_trailers_end(server):
    start = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    exchange(server, start, b"".join(b"t-%d: 1\r\n" % n for n in range(1000)), b"\r\n")
    server.canary()


def test_ordinary_headers_pass():
    with run_server(max_headers=20, max_header_bytes=4096) as server:
        headers = {f"x-{n}": "a" * 100 for n in range(10)}
        for _ in range(3):
            assert httpx.get(server.url + "/health", headers=headers).status_code == 200
        with httpx.Client(base_url=server.url, headers=headers) as client:
            for _ in range(5):  # one connection: the count begins anew with each request
                body = {"prompt": "x" * 3000, "max_tokens": 1}
                assert client.post("/v1/completions", json=body).status_code == 200


def test_an_upgrade_that_is_not_made_leaves_the_request_whole(server):
    """Java's HTTP client asks for HTTP/2 with every request, its body included."""
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    status, answer = parsed(exchange(server, head + body))
    assert status == 200 and answer["choices"][0]["text"] == "The"
    status, answer = parsed(exchange(server, head, body, pause=0.1))
    assert status == 200 and answer["choices"][0]["text"] == "The"


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: ",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_come_whole_ends(monkeypatch, start):
    monkeypatch.setattr(http_protocol, "MESSAGE_TIMEOUT", 0.2)
    monkeypatch.setattr("streamllm.server.run.KEEP_ALIVE", 0.2)
    with run_server() as server:
        began = time.monotonic()
        answer = exchange(server, start)
        assert time.monotonic() - began < 1.2, "the connection is open"
        if start:
            assert parsed(answer)[0] == 408
        server.canary()


def test_a_slow_request_that_comes_is_served(monkeypatch):
    monkeypatch.setattr(http_protocol, "MESSAGE_TIMEOUT", 0.3)
    with run_server() as server:
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        pieces = [body[index : index + 6] for index in range(0, len(body), 6)]
        assert parsed(exchange(server, head, *pieces, pause=0.1))[0] == 200


# -- large bodies ------------------------------------------------------------------------------------------


HUGE = {
    "text": b'{"prompt": "' + b"word, " * 4_000_000 + b'"}',
    "message": b'{"messages": [{"role": "user", "content": "' + b"word " * 4_000_000 + b'"}]}',
    "ids": b'{"prompt": [' + b"12," * 8_000_000 + b"12]}",
    "lists": b'{"prompt": [' + b"[]," * 8_000_000 + b"[]]}",
    "escapes": b'{"prompt": "' + b"\\n" * 12_000_000 + b'"}',
    "nested": b'{"prompt": ' + b"[" * 12_000_000 + b"}",
    "messages": b'{"messages": [' + b'{"role":"user","content":""},' * 100_000 + b'{"role":"user"}]}',
    "broken": b'{"prompt": "' + b"\\ud83d\\ude00" * 2_000_000 + b'\\ud800"}',
    "surrogates": b'{"prompt": "' + b"\\ud800" * 4_000_000 + b'"}',
}


# The first few stand for the others every time.
@pytest.mark.parametrize(
    "kind",
    [kind if index < 4 else pytest.param(kind, marks=pytest.mark.slow) for index, kind in enumerate(HUGE)],
)
def test_a_huge_body_holds_up_nobody(kind):
    """The goals are 1 s for streams and 200 ms for /health. Clients, server and threads share two cores and
    one interpreter here, with other tests beside them: the best of three attempts counts."""
    with run_server(step_seconds=0.002) as server:
        attempts = []
        while not attempts or (len(attempts) < 3 and not is_short(attempts[-1])):
            attempts.append(longest_gaps_beside(server, kind))
        assert is_short(attempts[-1]), attempts
        server.canary()


def is_short(gaps: tuple[float, float]) -> bool:
    return gaps[0] < 1.0 and gaps[1] < 0.5


def longest_gaps_beside(server, kind) -> tuple[float, float]:
    """Seconds that streams waited for a chunk, and that /health took, while a huge body was refused."""
    path = "/v1/chat/completions" if kind.startswith("message") else "/v1/completions"
    gaps, health, stop = [], [], threading.Event()

    def read_stream():
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}) as response:
            last = time.monotonic()
            for line in response.iter_lines():
                if line:
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
                if stop.is_set():
                    return

    def poll_health():
        with httpx.Client(base_url=server.url) as client:
            while not stop.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                health.append(time.monotonic() - began)
                time.sleep(0.01)

    threads = [threading.Thread(target=read_stream, daemon=True) for _ in range(3)]
    threads.append(threading.Thread(target=poll_health, daemon=True))
    for thread in threads:
        thread.start()
    server.wait_for(lambda: len(gaps) > 20 and len(health) > 2)
    gaps.clear()
    health.clear()
    response = httpx.post(server.url + path, content=HUGE[kind], timeout=30)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert response.status_code in (400, 413), response.text[:200]
    check_error(response, response.status_code, response.json()["error"]["code"])
    return max(gaps), max(health)


def test_what_a_large_body_may_hold():
    with run_server() as server:
        batch = {"prompt": [[97] * 400] * 1000, "max_tokens": 0, "echo": True}
        assert len(json.dumps(batch)) > 2**20
        assert server.post("/v1/completions", batch).status_code == 200
        many = b'{"prompt": [' + b"[97]," * 600_000 + b"[97]]}"
        check_error(server.post("/v1/completions", many), 413, "request_too_large")


# -- time --------------------------------------------------------------------------------------------------


def test_requests_that_take_too_long_end():
    with run_server(step_seconds=0.01, request_timeout=0.4, max_num_seqs=1) as server:
        began = time.monotonic()
        response = server.post("/v1/completions", LONG)
        error = check_error(response, 504, "request_timeout")
        assert error["type"] == "timeout_error" and "0.4 s" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert 0.35 < time.monotonic() - began < 1.5
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}) as response:
            *chunks, error, done = [line[6:] for line in response.iter_lines() if line]
        assert len(chunks) > 3 and done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "request_timeout"
        # Queued ones too.
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True, "n": 1}):
            assert server.post("/v1/completions", LONG).status_code == 504
        server.canary()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
            with pytest.raises(openai.InternalServerError) as failure:
                client.completions.create(model=MODEL, prompt="a", max_tokens=3000)
            assert failure.value.status_code == 504


def stalled_stream(server, max_tokens: int) -> socket.socket:
    """A connection that asks for a stream and never reads it."""
    body = json.dumps({**LONG, "max_tokens": max_tokens, "stream": True, "logprobs": 5, "n": 8}).encode()
    address = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address[0], int(address[1])))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return connection


def test_a_reader_that_stalls_is_cut_off_and_its_blocks_are_free():
    with run_server(stream_stall_timeout=0.3, step_seconds=0.001) as server:
        with stalled_stream(server, 4000) as connection:
            server.wait_for(lambda: server.stats().num_running == 8)
            server.wait_for(lambda: server.stats().num_running == 0, 20)
            assert server.stats().finished["abort"] == 1
            server.wait_for(lambda: not server.server.server_state.connections, 2)
            connection.settimeout(5)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(65536):
                    received += data
            assert received and b"[DONE]" not in received
        server.canary()


def test_a_slow_reader_that_reads_is_not_cut_off():
    with run_server(stream_stall_timeout=0.5, step_seconds=0.0005) as server:
        with stalled_stream(server, 300) as connection:
            connection.settimeout(10)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                data = connection.recv(20_000)
                assert data, "cut off"
                received += data
                time.sleep(0.01)
        assert b"[DONE]" in received and b'"error"' not in received
        server.canary()


async def test_bad_and_cut_off_requests_leave_nothing():
    with run_server() as server:

        async def one(client: httpx.AsyncClient, index: int) -> None:
            body = {"prompt": "x" * (index % 40 + 1), "max_tokens": index % 7 + 1, "stream": index % 2 == 0}
            if index % 3 == 0:
                body["temperature"] = "hot"
            if index % 3 == 1:
                with contextlib.suppress(asyncio.TimeoutError, httpx.HTTPError):
                    await asyncio.wait_for(client.post("/v1/completions", json=body), 0.002)
                return
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == (400 if index % 3 == 0 else 200)

        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
            for start in range(0, 600, 100):
                await asyncio.gather(*(one(client, start + index) for index in range(100)))
        server.wait_idle()
        server.wait_for(lambda: not server.server.server_state.connections, 3)
        assert not server.server.server_state.tasks and len(server.server._state.in_flight) == 0
        server.canary()
