"""How a line is answered: by the application's own routes, called in this process, when there is room."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import Message, Scope

from streamllm.server.batches.lines import LineRequest
from streamllm.server.batches.store import Result
from streamllm.server.errors import EXCEPTION_HANDLERS, error_body
from streamllm.server.in_flight import InFlight
from streamllm.server.middleware import UnexpectedErrors
from streamllm.server.owners import OWNER
from streamllm.server.request_context import RequestContext, enter_request

if TYPE_CHECKING:
    from streamllm.server.generation import ServerState

MAX_LINES_IN_FLIGHT = 64

BATCH_PRIORITY = 1_000_000
"""``priority`` of lines that bring none: behind everybody else, under ``--scheduling-policy priority``."""

FIRST_DELAY, LONGEST_DELAY = 0.25, 10.0
"""Seconds before a line that found no room is tried again; twice as many each time."""

HOPELESS = 5
"""Refusals after which a line is given up if the engine has nothing else to do."""

LOOK_INTERVAL = 0.1
"""Seconds after which it is looked again whether live traffic has ended."""

SHARE_BESIDE_OTHERS = 8
"""Beside live traffic, one line runs where that many would run without."""


class Answer(NamedTuple):
    """What a route said to a line."""

    status: int
    request_id: str
    body: bytes


class _Wishes(msgspec.Struct):
    """Fields of a line's body that cannot be granted."""

    stream: Any = None
    background: Any = None


class LineRunner:
    """Answers lines.

    Args:
        app: whose routes are called, below what is in front of them for clients: keys, logs, CORS.

    Attributes:
        num_in_flight: calls under way.
    """

    def __init__(self, app: Starlette) -> None:
        self.num_in_flight = 0
        self._app = app
        self._call = UnexpectedErrors(ExceptionMiddleware(app.router, handlers=EXCEPTION_HANDLERS))

    async def run(self, line: LineRequest, owner: str) -> Result:
        """The result of a line, however long it takes. Must be called in a task of its own.

        Args:
            owner: of what the route stores.
        """
        delay, num_refusals = FIRST_DELAY, 0
        while True:
            answer = await self._ask(line, owner)
            if answer.status not in (429, 503):
                break
            num_refusals += 1
            if num_refusals >= HOPELESS and self._is_hopeless():
                break
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(2 * delay, LONGEST_DELAY)
        return Result(line.number, answer.status != 200, answer_line(line.custom_id, answer))

    def _is_hopeless(self) -> bool:
        """Whether what has been refused would be refused at any time."""
        server: ServerState = self._app.state.server
        stats = server.engine.stats()
        may_run = server.in_flight.admits and server.engine.is_healthy
        return may_run and stats.num_running == stats.num_waiting == 0

    async def _ask(self, line: LineRequest, owner: str) -> Answer:
        # A line has the time that its batch has, not a request's.
        context = RequestContext(uuid.uuid4().hex, line.url, arrival_time=math.inf, priority=BATCH_PRIORITY)
        enter_request(context)
        if (refusal := _refusal(line.body)) is not None:
            return Answer(400, context.request_id, orjson.dumps(refusal))
        status, pieces = 500, []
        received = False

        async def receive() -> Message:
            nonlocal received
            if received:
                await asyncio.Event().wait()
            received = True
            return {"type": "http.request", "body": line.body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                pieces.append(message.get("body", b""))

        self.num_in_flight += 1
        try:
            await self._call(self._scope(line, owner), receive, send)
        finally:
            self.num_in_flight -= 1
        return Answer(status, context.request_id, b"".join(pieces))

    def _scope(self, line: LineRequest, owner: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": line.url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(line.body)).encode()),
            ],
            "client": None,
            "server": None,
            "app": self._app,
            OWNER: owner,
        }


def _refusal(body: bytes) -> dict[str, Any] | None:
    """The error for a body that asks for what a line cannot have."""
    try:
        wishes = msgspec.json.decode(body, type=_Wishes)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None  # the route says what is wrong
    for name in ("stream", "background"):
        if getattr(wishes, name) is True:
            message = f"{name} must be false in a batch: a line has one answer."
            return error_body(message, status=400, param=name)
    return None


def answer_line(custom_id: str, answer: Answer) -> bytes:
    """A route's answer as a line of an output or error file."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": orjson.Fragment(answer.body or b"null"),
    }
    return _output_line(custom_id, response, None)


def error_line(custom_id: str | None, error: dict[str, Any]) -> bytes:
    """A line that was not asked, as a line of an error file."""
    return _output_line(custom_id, None, error)


def _output_line(custom_id: str | None, response: Any, error: Any) -> bytes:
    return orjson.dumps(
        {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


class Places:
    """How many lines may be under way: half of the sequences that run at once, and an eighth of that while
    others have requests in flight, so that live traffic finds room and steps that are not too full.

    Args:
        in_flight: the server's requests, the lines among them.
        max_num_seqs: sequences that the engine runs at once.
    """

    def __init__(self, in_flight: InFlight, lines: LineRunner, max_num_seqs: int) -> None:
        self._in_flight = in_flight
        self._lines = lines
        self._most = max(min(max_num_seqs // 2, MAX_LINES_IN_FLIGHT), 1)
        self._taken = 0
        self._freed = asyncio.Event()

    async def take(self) -> None:
        """Wait for a place and take it."""
        while self._taken >= self._allowed():
            self._freed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._freed.wait(), LOOK_INTERVAL)
        self._taken += 1

    def give_back(self) -> None:
        self._taken -= 1
        self._freed.set()

    def _allowed(self) -> int:
        if not self._in_flight.admits:
            return 0
        if len(self._in_flight) > self._lines.num_in_flight:
            return max(self._most // SHARE_BESIDE_OTHERS, 1)
        return self._most
