"""The load generator's transport against a server that says exactly what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from streamllm.http_transport import LeanTransport

Answer = list[bytes]
"""Pieces that the server writes, each by itself."""


@contextlib.asynccontextmanager
async def server(
    answers: Callable[[bytes], Answer], *, close: bool = False
) -> AsyncIterator[tuple[str, list]]:
    """Answers each request by its head; gives the URL and the connections that came."""
    connections: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or b"0"))
                for piece in answers(head):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.005)
                if close:
                    break
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", connections


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=LeanTransport(), timeout=5.0)


CHUNKED: Answer = [
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Name: a\r\n\r\n",
    b"5\r\nda", b"ta:\r\n3\r\n x\n\r\n", b"0\r\n\r\n",
]  # fmt: skip


async def test_a_chunked_answer_comes_as_it_is_sent_and_its_connection_serves_the_next() -> None:
    async with server(lambda head: CHUNKED) as (url, connections), client() as http:
        for _ in range(3):
            async with http.stream("POST", url, json={"n": 1}) as response:
                pieces = [piece async for piece in response.aiter_raw()]
            assert (response.status_code, response.headers["x-name"]) == (200, "a")
            assert b"".join(pieces) == b"data: x\n"
            assert len(pieces) > 1
        assert len(connections) == 1


async def test_requests_at_once_have_a_connection_each() -> None:
    async with server(lambda head: CHUNKED) as (url, connections), client() as http:
        answers = await asyncio.gather(*(http.get(url) for _ in range(5)))
        assert [answer.content for answer in answers] == [b"data: x\n"] * 5
        assert len(connections) == 5


async def test_head_body_and_target_arrive_as_httpx_made_them() -> None:
    heads: list[bytes] = []

    def answer(head: bytes) -> Answer:
        heads.append(head)
        return [b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"]

    async with server(answer) as (url, _), client() as http:
        response = await http.post(f"{url}/v1/x?y=1", json={"n": 1}, headers={"Authorization": "Bearer k"})
    assert (response.status_code, response.json()) == (404, {})
    assert heads[0].startswith(b"POST /v1/x?y=1 HTTP/1.1\r\n")
    assert b"authorization: bearer k" in heads[0].lower()


async def test_the_end_of_the_connection_ends_a_body_without_a_length() -> None:
    answer = [b"HTTP/1.1 200 OK\r\n\r\n", b"all ", b"of it"]
    async with server(lambda head: answer, close=True) as (url, _), client() as http:
        assert (await http.get(url)).content == b"all of it"


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"]
    async with server(lambda head: answer, close=True) as (url, connections), client() as http:
        for _ in range(2):
            assert (await http.get(url)).content == b"x"
            await asyncio.sleep(0.05)
        assert len(connections) == 2


async def test_a_connection_closed_just_as_it_is_taken_again_costs_nothing() -> None:
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"]
    async with server(lambda head: answer, close=True) as (url, connections), client() as http:
        # Nothing lets the loop see the end of the first connection before the second request is sent.
        assert [(await http.get(url)).content for _ in range(5)] == [b"x"] * 5
        assert len(connections) == 5


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"cut"], httpx.ReadError),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"], httpx.ReadError),
        ([], httpx.ReadError),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], httpx.RemoteProtocolError),
    ],
)
async def test_a_broken_answer_is_httpx_s_error(answer: Answer, error: type[Exception]) -> None:
    async with server(lambda head: answer, close=True) as (url, _), client() as http:
        with pytest.raises(error):
            await http.get(url)


async def test_a_refused_connection_and_a_silent_server_are_httpx_s_errors() -> None:
    async with server(lambda head: []) as (url, _), client() as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.get(url, timeout=0.1)
    async with client() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)
