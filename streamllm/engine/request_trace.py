"""Why a request took as long as it did: what it waited for, what was computed for it, in what company."""

from __future__ import annotations

import time
from dataclasses import dataclass

from streamllm.engine.events import Event
from streamllm.engine.live_requests import LiveRequest, live_requests
from streamllm.engine.request import Request
from streamllm.engine.request_history import RequestHistory
from streamllm.engine.stats import RequestRecord, request_record
from streamllm.engine.step_history import StepHistory, StepSpan


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request, from the queue to its end or to now.

    Attributes:
        record: its times and counts.
        live: its state now; ``None`` if it has ended.
        events: what happened to it, oldest first.
        waiting: if it waits now: seconds by what it has waited for since it was queued or preempted.
        steps: the steps from its first scheduling on, as far as they are still known. They are everybody's:
            one that was preempted had no part in those between.
    """

    record: RequestRecord
    live: LiveRequest | None
    events: list[Event]
    waiting: dict[str, float] | None
    steps: list[StepSpan]

    @property
    def waited(self) -> dict[str, float]:
        """Seconds in the queue by what was waited for, all waits together."""
        waits = [event.waited for event in self.events if event.waited is not None]
        if self.waiting is not None:
            waits.append(self.waiting)
        total: dict[str, float] = {}
        for wait in waits:
            for reason, seconds in wait.items():
                total[reason] = total.get(reason, 0.0) + seconds
        return total


def make_trace(
    request_id: str, request: Request | None, history: RequestHistory, steps: StepHistory | None
) -> RequestTrace | None:
    """The trace of a request; ``None`` if it neither lives nor is kept.

    Args:
        request: the request while it lives.
        steps: where to look its steps up; ``None`` to leave them out.
    """
    now = time.monotonic()
    live = waiting = None
    if request is not None:
        record = request_record(request, "", now)
        (live,) = live_requests([request], now)
        waiting = history.waiting(request_id, now)
    elif (ended := history.ended.get(request_id)) is not None:
        record = ended.record
    else:
        return None
    spans: list[StepSpan] = []
    if record.first_scheduled_time is not None and steps is not None:
        end = record.finished_time if live is not None else record.last_token_time or record.finished_time
        spans = steps.spans(record.first_scheduled_time, end)
    return RequestTrace(record, live, history.events(request_id), waiting, spans)
