"""What is known about the HTTP request that the current task serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
        arrival_time: when its headers had come, seconds of ``time.monotonic()``.
        streams: the engine's requests that answer it.
        num_bytes_past_middleware: of its answer, what no middleware has seen.
    """

    request_id: str = ""
    arrival_time: float = field(default_factory=time.monotonic)
    streams: Sequence[RequestStream] = ()
    num_bytes_past_middleware: int = 0


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
