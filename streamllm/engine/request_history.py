"""The events of each request that lives or has ended lately."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from streamllm.engine.events import Event, EventKind
from streamllm.engine.stats import RequestRecord
from streamllm.engine.wait_clock import Mark, WaitClock

MAX_EVENTS = 256
"""Of one request; more lose those in the middle."""


@dataclass(slots=True)
class EndedRequest:
    """A request that has ended, and its events, oldest first."""

    record: RequestRecord
    events: list[Event] = field(default_factory=list)


class RequestHistory:
    """Bounded whatever comes: so many requests that have ended, and so many events of theirs.

    Args:
        max_ended: requests kept after their end.
        max_ended_events: events of theirs.

    Attributes:
        waits: what the queue waits for; whoever schedules turns it.
        ended: requests that have ended, the latest last.
    """

    def __init__(self, max_ended: int = 1000, max_ended_events: int = 50_000) -> None:
        self.waits = WaitClock()
        self.ended: OrderedDict[str, EndedRequest] = OrderedDict()
        self._max_ended = max_ended
        self._max_ended_events = max_ended_events
        self._num_ended_events = 0
        self._live: dict[str, list[Event]] = {}
        self._marks: dict[str, Mark] = {}

    def events(self, request_id: str) -> list[Event]:
        """The events of a request, oldest first; none of one that is not known."""
        if request_id in self._live:
            return list(self._live[request_id])
        ended = self.ended.get(request_id)
        return [] if ended is None else list(ended.events)

    def waited(self, kind: EventKind, request_id: str, now: float) -> dict[str, float] | None:
        """What a request that is scheduled has waited for; called ahead of every event."""
        if kind == "scheduled" and (mark := self._marks.pop(request_id, None)) is not None:
            return self.waits.since(mark, now)
        if kind in ("queued", "preempted"):
            self._marks.setdefault(request_id, self.waits.mark(now))
        return None

    def waiting(self, request_id: str, now: float) -> dict[str, float] | None:
        """What a request has waited for since it was queued or preempted; ``None`` if it does not wait."""
        mark = self._marks.get(request_id)
        return None if mark is None else self.waits.since(mark, now)

    def add(self, event: Event) -> None:
        """Sort an event in; that a request has ended, :meth:`end` must say too."""
        if event.kind == "queued":
            self._live[event.request_id] = [event]
        elif (events := self._live.get(event.request_id)) is not None:
            events.append(event)
            if len(events) > MAX_EVENTS:
                del events[MAX_EVENTS // 2]

    def end(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._marks.pop(record.request_id, None)
        self._drop(record.request_id)
        events = self._live.pop(record.request_id, [])
        self.ended[record.request_id] = EndedRequest(record, events)
        self._num_ended_events += len(events)
        while len(self.ended) > self._max_ended or self._num_ended_events > self._max_ended_events:
            self._drop(next(iter(self.ended)))

    def forget_ended(self) -> None:
        """Forget every request that has ended."""
        self.ended.clear()
        self._num_ended_events = 0

    def _drop(self, request_id: str) -> None:
        ended = self.ended.pop(request_id, None)
        if ended is not None:
            self._num_ended_events -= len(ended.events)
