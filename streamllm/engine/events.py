"""What happened to requests: a bounded ring that metrics, traces and the page read."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from streamllm.engine.request_history import RequestHistory

EventKind = Literal["queued", "scheduled", "prefill", "preempted", "first_token", "finished"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        time: seconds of ``time.monotonic()``.
        kind: what happened. ``scheduled``: one of the request's sequences got its place in the batch, for the
            first time or again; ``prefill``: a step computes a chunk of its prompt.
        request_id: to which request.
        num_tokens: what goes with it: ``queued`` prompt tokens; ``scheduled`` cached tokens; ``prefill``
            tokens of the chunk; ``preempted`` computed tokens that were lost; ``finished`` generated tokens.
        detail: ``finished``: the reason.
        waited: ``scheduled``: seconds since it was queued or preempted by what it waited for
            (:data:`streamllm.engine.wait_clock.WaitReason`), where that is known.
    """

    time: float
    kind: EventKind
    request_id: str
    num_tokens: int = 0
    detail: str = ""
    waited: dict[str, float] | None = None


class EventLog:
    """The latest events, oldest first.

    Args:
        size: events kept.
        history: sorts them by request as well.
    """

    def __init__(self, size: int = 10_000, history: RequestHistory | None = None) -> None:
        self._events: deque[Event] = deque(maxlen=size)
        self._history = history
        self.num_recorded = 0

    def record(self, kind: EventKind, request_id: str, num_tokens: int = 0, detail: str = "") -> float:
        """Note an event; returns its time."""
        now = time.monotonic()
        history = self._history
        waited = None if history is None else history.waited(kind, request_id, now)
        event = Event(now, kind, request_id, num_tokens, detail, waited)
        self._events.append(event)
        self.num_recorded += 1
        if history is not None:
            history.add(event)
        return now

    def since(self, number: int) -> tuple[list[Event], int]:
        """Events from the ``number``-th on that are still kept, and the number to ask with next time."""
        missing = max(self.num_recorded - number, 0)
        return list(self._events)[-missing:] if missing else [], self.num_recorded
