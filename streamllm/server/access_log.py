"""One line for each HTTP request, when it has been answered."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamllm.server.request_context import current_request
from streamllm.server.timings import timings

logger = logging.getLogger("streamllm.access")

MAX_PATH_LENGTH = 500
MAX_WAITING_LINES = 10_000


def log_to_stdout() -> None:
    """Write the lines, and nothing else, to standard output: in a thread, so that a terminal or a pipe that
    takes nothing holds up no request. What it does not take in time is dropped."""
    printer = logging.StreamHandler(sys.stdout)
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING_LINES)
    listener = logging.handlers.QueueListener(waiting, printer)
    listener.start()
    atexit.register(listener.stop)
    logger.addHandler(_DroppingHandler(waiting))
    logger.propagate = False
    logger.setLevel(logging.INFO)


class _DroppingHandler(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class AccessLog:
    """Logs each request. Everything a client has sent is escaped, and query strings, which may hold secrets,
    are left out.

    Args:
        style: ``"plain"`` or ``"json"``.
        left_out: paths that are not logged.
    """

    def __init__(self, app: ASGIApp, style: str, left_out: Collection[str] = ()) -> None:
        self.app = app
        self._format = _as_json if style == "json" else _as_text
        self._left_out = frozenset(left_out)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._left_out:
            await self.app(scope, receive, send)
            return
        status, num_bytes, complete = 0, 0, False

        async def counting_send(message: Message) -> None:
            nonlocal status, num_bytes, complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                num_bytes += len(message.get("body", b""))
                complete = not message.get("more_body", False)

        try:
            await self.app(scope, receive, counting_send)
        finally:
            num_bytes += current_request().num_bytes_past_middleware
            logger.info(self._format(_entry(scope, status, num_bytes, complete)))


def _entry(scope: Scope, status: int, num_bytes: int, complete: bool) -> dict[str, Any]:
    """The fields of a line. ``complete``: the answer went out to its end; ``request_id`` is the client's or
    the one that it was told."""
    context = current_request()
    now = datetime.datetime.now(datetime.timezone.utc)
    entry: dict[str, Any] = {
        "time": now.isoformat(timespec="milliseconds"),
        "request_id": context.request_id,
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_LENGTH],
        "status": status,
        "duration_ms": round(1000 * (time.monotonic() - context.arrival_time), 3),
        "bytes": num_bytes,
        "complete": complete,
    }
    if context.streams:
        times = timings(context.streams)
        entry["prompt_tokens"] = sum(len(stream.prompt_token_ids) for stream in context.streams)
        entry["completion_tokens"] = sum(stream.num_pushed_tokens for stream in context.streams)
        entry["queue_time_ms"] = times["queue_time_ms"]
        entry["time_to_first_token_ms"] = times["time_to_first_token_ms"]
    return entry


def _as_json(entry: dict[str, Any]) -> str:
    # All but ASCII is escaped: some of it steers terminals or ends lines.
    return json.dumps(entry)


def _as_text(entry: dict[str, Any]) -> str:
    line = "{time} {client} {method} {0} {status} {duration_ms:.1f} ms {request_id}".format(
        json.dumps(entry["path"]), **entry
    )
    if "prompt_tokens" in entry:
        line += f" {entry['prompt_tokens']}+{entry['completion_tokens']} tokens"
    return line if entry["complete"] else line + " incomplete"
