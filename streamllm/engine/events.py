"""What happened to requests: a bounded ring that metrics, traces and the page read."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["queued", "scheduled", "preempted", "first_token", "finished"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        time: seconds of ``time.monotonic()``.
        kind: what happened.
        request_id: to which request.
        num_tokens: what goes with it: ``queued`` prompt tokens; ``scheduled`` cached tokens; ``preempted``
            computed tokens that were lost; ``finished`` generated tokens.
        detail: ``finished``: the reason.
    """

    time: float
    kind: EventKind
    request_id: str
    num_tokens: int = 0
    detail: str = ""


class EventLog:
    """The latest events, oldest first.

    Args:
        size: events kept.
    """

    def __init__(self, size: int = 10_000) -> None:
        self._events: deque[Event] = deque(maxlen=size)
        self.num_recorded = 0

    def record(self, kind: EventKind, request_id: str, num_tokens: int = 0, detail: str = "") -> float:
        """Note an event; returns its time."""
        now = time.monotonic()
        self._events.append(Event(now, kind, request_id, num_tokens, detail))
        self.num_recorded += 1
        return now

    def since(self, number: int) -> tuple[list[Event], int]:
        """Events from the ``number``-th on that are still kept, and the number to ask with next time."""
        missing = max(self.num_recorded - number, 0)
        return list(self._events)[-missing:] if missing else [], self.num_recorded
