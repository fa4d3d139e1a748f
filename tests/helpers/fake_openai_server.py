"""A small OpenAI-compatible server with scripted delays and faults, on a loopback port of this process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

API_KEY = "secret-key"
Fault = Literal["http_500", "hang_up", "error_event", "cut_short", "not_json", "stall"]


class FakeServer:
    """Echoes the prompt's words as its tokens, each with a line separator in it, around again when they end.

    Its behaviour is set by attributes, before or while it runs:

    Attributes:
        first_delay, token_delay: seconds before the first and before each further token.
        prompt_tokens: how a prompt of so many words is counted.
        faults: streamed request number (0, 1, ... by arrival) -> one of :data:`Fault`.
        changed: streamed request numbers whose last token differs from the unstreamed answer's.
        leaked_usage: what ``kv_cache_usage_perc`` reports once idle.
        report_usage: whether answers carry usage.
        num_unready: so many first requests for the models are answered with 503.

    ``api_key`` is the key that requests must bring, or ``None``. Of streamed requests it records ``bodies``,
    ``headers``, ``paths`` and ``arrivals`` (their times); and ``peak_running``.
    """

    def __init__(self, api_key: str | None = API_KEY) -> None:
        self.api_key = api_key
        self.first_delay = 0.0
        self.token_delay = 0.0
        self.prompt_tokens: Callable[[int], int] = lambda words: words
        self.faults: dict[int, Fault] = {}
        self.changed: set[int] = set()
        self.leaked_usage = 0.0
        self.report_usage = True
        self.num_unready = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.arrivals: list[float] = []
        self.running = 0
        self.peak_running = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._generate, methods=["POST"]),
            Route("/v1/chat/completions", self._generate, methods=["POST"]),
            Route("/metrics", self._metrics),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _models(self, request: Request) -> Response:
        if self.num_unready > 0:
            self.num_unready -= 1
            return JSONResponse({"error": {"message": "loading", "type": "unavailable"}}, 503)
        return JSONResponse({"object": "list", "data": [{"id": "echo", "object": "model"}]})

    async def _metrics(self, request: Request) -> Response:
        usage = self.leaked_usage or self.running / 100
        return PlainTextResponse(
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0",model_name="echo"}} {self.running}.0\n'
            'vllm:num_requests_waiting{engine="0",model_name="echo"} 0.0\n'
            'vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="echo"}} {usage}\n'
        )

    async def _generate(self, request: Request) -> Response:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "wrong key", "type": "auth", "code": 401}}, 401)
        body = await request.json()
        chat = "messages" in body
        words = (body["messages"][0]["content"] if chat else body["prompt"]).split()
        tokens = [f"{words[i % len(words)]}\u2028 " for i in range(body["max_tokens"])]
        usage = {"prompt_tokens": self.prompt_tokens(len(words)), "completion_tokens": len(tokens)}
        if not body.get("stream"):
            text = "".join(tokens)
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            answer: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": "length", **choice}]}
            return JSONResponse(answer | ({"usage": usage} if self.report_usage else {}))
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        self.arrivals.append(time.monotonic())
        if number in self.changed:
            tokens[-1] = "PLANTED"
        fault = self.faults.get(number)
        if fault == "http_500":
            return JSONResponse({"error": {"message": "out of luck", "type": "server_error"}}, 500)
        events = self._stream(tokens, usage, chat, fault)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _stream(
        self, tokens: list[str], usage: dict[str, int], chat: bool, fault: Fault | None
    ) -> AsyncIterator[bytes]:
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        try:
            if chat:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for position, token in enumerate(tokens):
                await asyncio.sleep(self.token_delay if position else self.first_delay)
                last = position == len(tokens) - 1
                if last and fault == "hang_up":
                    raise ConnectionAbortedError
                if last and fault == "error_event":
                    yield _event({"error": {"message": "engine died", "type": "server_error"}})
                    return
                if last and fault == "cut_short":
                    return
                if last and fault == "not_json":
                    yield b"data: {broken\n\n"
                if last and fault == "stall":
                    await asyncio.sleep(30)
                part = {"delta": {"content": token}} if chat else {"text": token}
                yield _event({"choices": [{"index": 0, "finish_reason": "length" if last else None, **part}]})
            if self.report_usage:
                yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
