"""What is known about the HTTP request that the current task serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamllm.engine.stream import RequestStream


@dataclass(slots=True)
class RequestContext:
    """One HTTP request.

    Attributes:
        request_id: the client's ``X-Request-Id`` as far as it is printable, or one made up. Not unique: for
            logs and the client only.
        path: of its URL, without the prefix under which the server is mounted.
        arrival_time: when its headers had come, seconds of ``time.monotonic()``.
        streams: the engine's requests that answer it.
        trace_headers: W3C trace context that came with it (``traceparent``, ``tracestate``).
        on_streams: called when ``streams`` are known.
        priority: of what it asks of the engine, unless it says itself.
        num_bytes_past_middleware: of its answer, what no middleware has seen.
    """

    request_id: str = ""
    path: str = ""
    arrival_time: float = field(default_factory=time.monotonic)
    streams: Sequence[RequestStream] = ()
    priority: int = 0
    num_bytes_past_middleware: int = 0
    trace_headers: dict[str, str] = field(default_factory=dict)
    on_streams: Callable[[RequestContext], None] | None = None

    def answered_by(self, streams: Sequence[RequestStream]) -> None:
        """These of the engine's requests answer it."""
        self.streams = streams
        if self.on_streams is not None:
            self.on_streams(self)

    def priority_of(self, given: int | None) -> int:
        """The priority of a request whose body has ``given`` in that field."""
        return self.priority if given is None else given


_current: ContextVar[RequestContext] = ContextVar("streamllm_request")


def enter_request(context: RequestContext) -> None:
    """Make ``context`` the current task's, and that of every task it starts."""
    _current.set(context)


def current_request() -> RequestContext:
    """The current task's request; a new one where no middleware has entered any."""
    try:
        return _current.get()
    except LookupError:
        return RequestContext()
