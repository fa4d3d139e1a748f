"""A live server with what every case needs: posting, streams as events, and the canary."""

from __future__ import annotations

import json
from typing import Any

import httpx
from helpers.live_server import LiveServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES = (CHAT, COMPLETIONS)
CANARY = {"prompt": "The canary sings in the morning, and", "temperature": 0, "max_tokens": 6}


class CaseServer(LiveServer):
    """
    Args:
        flags: of ``streamllm serve``.
        key: sent with each request.
    """

    def __init__(self, *flags: str, key: str | None = None) -> None:
        super().__init__(*flags)
        headers = {} if key is None else {"Authorization": b"Bearer " + key.encode()}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=60)
        self._song: str | None = None

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        super().__exit__(*exception)

    def another_client(self) -> httpx.Client:
        """A client with a connection of its own."""
        return httpx.Client(base_url=self.url, headers=self.client.headers, timeout=60)

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST a body: bytes as they are, anything else as JSON."""
        if not isinstance(body, bytes):
            return self.client.post(path, json=body)
        return self.client.post(path, content=body, headers={"content-type": "application/json"})

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """A whole answer as strictly valid JSON, which knows neither NaN nor Infinity."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return json.loads(response.text, parse_constant=_no_constant)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream; [DONE] stands once, last."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        blocks = response.text.split("\n\n")
        assert blocks.pop() == "" and blocks.pop() == "data: [DONE]"
        assert all(block.startswith("data: {") for block in blocks)
        return [json.loads(block[6:], parse_constant=_no_constant) for block in blocks]

    def deltas(self, path: str, body: dict[str, Any], index: int = 0) -> list[str]:
        """The pieces of one choice's streamed text, empty ones too."""
        pieces = []
        for event in self.events(path, body):
            for choice in event["choices"]:
                if choice["index"] == index:
                    pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content"))
        return [piece for piece in pieces if piece is not None]

    def refusal(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error that a body is answered with, the same with ``stream``."""
        response = self.post(path, body)
        error = check_error(response, status)
        if isinstance(body, dict):
            assert self.post(path, body | {"stream": True}).text == response.text
        return error

    def canary(self) -> None:
        """The server answers as ever and holds nothing."""
        self.wait_until_quiet()
        song = self.answer(COMPLETIONS, CANARY)["choices"][0]["text"]
        self._song = self._song or song
        assert song == self._song
        assert self.client.get("/health").status_code == 200
        self.wait_until_quiet()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, by its name without prefix."""
        lines = self.client.get("/metrics").text.splitlines()
        wanted = f"streamllm:{name}"
        values = [line.rpartition(" ")[2] for line in lines if line.split("{")[0].split(" ")[0] == wanted]
        assert values, f"no metric {name}"
        return sum(map(float, values))


def minimal(path: str, **fields: Any) -> dict[str, Any]:
    """The least that a route takes."""
    required = (
        {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Once upon a time"}
    )
    return {**required, "max_tokens": 4, "temperature": 0, **fields}


def forced(text: str, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """A request whose answer is ``text`` whatever the weights."""
    constraint = {"structured_outputs": {"choice": [text]}}
    return minimal(path, **constraint, **{"max_tokens": 200, **fields})


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a response, in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert not any(word in error["message"] for word in ("Traceback", "<class", "object at 0x"))
    return error


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
