"""The engine's last seconds in Chrome's trace format, which Perfetto (https://ui.perfetto.dev) shows.

Three groups of tracks: the phases of each step on the event loop, and the forwards; counters; and one track a
request, with its time in the queue, its prefill and its decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from streamllm.engine.events import Event
from streamllm.engine.stats import RequestRecord
from streamllm.engine.step_history import PHASES, StepRecord

ENGINE, REQUESTS = 1, 2
"""Process ids of the groups."""

LOOP, FORWARD = 1, 2
"""Thread ids of the engine's tracks."""

Row = dict[str, Any]


def chrome_trace(
    steps: Sequence[StepRecord], requests: Iterable[tuple[RequestRecord, list[Event]]], since: float
) -> bytes:
    """The trace as JSON. Times in it are microseconds from its beginning.

    Args:
        steps: the oldest first.
        requests: with their events.
        since: what was over by then is left out; seconds of ``time.monotonic()``.
    """
    shown = [step for step in steps if step.returned > since]
    lives = [(record, events) for record, events in requests if record.finished_time > since]
    times = [step.began for step in shown] + [record.arrival_time for record, _ in lives]
    zero = min(times, default=since)
    rows = [
        _name("process_name", ENGINE, 0, "engine"),
        _name("thread_name", ENGINE, LOOP, "event loop"),
        _name("thread_name", ENGINE, FORWARD, "forward"),
        _name("process_name", REQUESTS, 0, "requests"),
    ]
    rows += _steps(shown, zero)
    for number, (record, events) in enumerate(lives, start=1):
        rows.append(_name("thread_name", REQUESTS, number, record.request_id))
        rows += _request(number, record, events, zero)
    return orjson.dumps({"displayTimeUnit": "ms", "traceEvents": rows})


def _steps(steps: Iterable[StepRecord], zero: float) -> Iterator[Row]:
    free_at = 0.0
    for step in steps:
        figures = {
            "step": step.number,
            "sequences": step.num_sequences,
            "tokens": step.num_tokens,
            "prompt tokens": step.num_prompt_tokens,
        }
        for phase, (start, end) in zip(PHASES, step.phases, strict=True):
            if end > start:
                yield _slice(phase, ENGINE, LOOP, start, end, zero, {"step": step.number})
        # Steps are computed one after the other, also where several are in flight.
        name = "failed step" if step.failed else "step"
        yield _slice(name, ENGINE, FORWARD, max(step.submitted, free_at), step.returned, zero, figures)
        free_at = step.returned
        for counter, value in (
            ("running", step.num_running),
            ("waiting", step.num_waiting),
            ("KV blocks", step.num_used_blocks),
            ("tokens a step", step.num_tokens),
        ):
            yield {
                "ph": "C", "name": counter, "pid": ENGINE, "ts": _microseconds(step.began, zero),
                "args": {"value": value},
            }  # fmt: skip


def _request(track: int, record: RequestRecord, events: list[Event], zero: float) -> Iterator[Row]:
    figures = {
        "prompt tokens": record.num_prompt_tokens,
        "cached tokens": record.num_cached_tokens,
        "generated tokens": record.num_generation_tokens,
        "preemptions": record.num_preemptions,
        "finish reason": record.finish_reason or "none yet",
    }
    end = record.finished_time
    yield _slice(record.request_id, REQUESTS, track, record.arrival_time, end, zero, figures)
    waited = next((event.waited for event in events if event.waited is not None), None) or {}
    seconds_waited = {f"{reason} (s)": seconds for reason, seconds in waited.items()}
    scheduled, first_token = record.last_scheduled_time, record.first_token_time
    for name, start, until, arguments in (
        ("queue", record.queued_time, scheduled or end, seconds_waited),
        ("prefill", scheduled, first_token or end, {}),
        ("decode", first_token, end, {}),
    ):
        if start is not None:
            yield _slice(name, REQUESTS, track, start, until, zero, arguments)
    for event in events:
        if event.kind in ("prefill", "preempted"):
            yield {
                "ph": "i", "s": "t", "name": event.kind, "pid": REQUESTS, "tid": track,
                "ts": _microseconds(event.time, zero), "args": {"tokens": event.num_tokens},
            }  # fmt: skip


def _slice(name: str, pid: int, tid: int, start: float, end: float, zero: float, args: Row) -> Row:
    ts = _microseconds(start, zero)
    duration = max(_microseconds(end, zero) - ts, 0.0)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": duration, "args": args}


def _name(kind: str, pid: int, tid: int, name: str) -> Row:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(time: float, zero: float) -> float:
    return round(1e6 * (time - zero), 1)
