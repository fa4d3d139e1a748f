"""``GET /v1/requests``, ``/v1/requests/{id}/trace`` and ``/debug/perfetto``: why a request was slow.

Neither prompts nor texts are shown.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from streamllm.errors import InvalidRequestError
from streamllm.server.json_response import json_response
from streamllm.server.perfetto import chrome_trace
from streamllm.server.query import query_number

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.events import Event
    from streamllm.engine.live_requests import LiveRequest
    from streamllm.engine.request_trace import RequestTrace
    from streamllm.engine.stats import RequestRecord
    from streamllm.engine.step_history import StepSpan
    from streamllm.server.request_origins import RequestOrigins

MAX_LISTED = 1000
MAX_TRACED = 100
"""Requests of the engine shown in one trace: an answer has as many as it has prompts."""

MAX_PERFETTO_SECONDS = 3600.0

EVENT_TOKENS = {
    "queued": "prompt_tokens",
    "scheduled": "cached_tokens",
    "prefill": "tokens",
    "preempted": "lost_tokens",
    "finished": "generated_tokens",
}
"""What an event's number of tokens is."""


async def list_requests(request: Request) -> Response:
    """The requests that wait or run, oldest first, then those that have ended lately, latest first."""
    engine, origins = request.app.state.server.engine, request.app.state.origins
    limit = query_number(request, "limit", 100, 1, MAX_LISTED)
    rows = [_live(origins, each) for each in engine.live_requests(limit)]
    for ended in reversed(engine.history.ended.values()):
        if len(rows) >= limit:
            break
        rows.append(_ended(origins, ended.record))
    return json_response({"object": "list", "data": rows})


async def request_trace(request: Request) -> Response:
    """What happened to a request, live or ended lately; the id is its answer's, or its X-Request-Id."""
    engine: AsyncEngine = request.app.state.server.engine
    origins: RequestOrigins = request.app.state.origins
    name = request.path_params["id"]
    found = []
    for engine_id in origins.engine_ids(name)[:MAX_TRACED]:
        trace = engine.trace(engine_id)
        if trace is not None:
            found.append(_names(origins, engine_id) | _trace(trace))
    if not found:
        raise InvalidRequestError(
            f"No request {name[:200]!r} is live, nor among the last that have ended.", param="id", status=404
        )
    return json_response({"object": "request.trace", "id": name, "requests": found})


async def perfetto(request: Request) -> Response:
    """The engine's last seconds as a trace that Perfetto shows (ui.perfetto.dev)."""
    engine: AsyncEngine = request.app.state.server.engine
    seconds = query_number(request, "seconds", 10.0, 0.001, MAX_PERFETTO_SECONDS)
    steps = list(engine.steps.latest)
    traces = [(ended.record, list(ended.events)) for ended in engine.history.ended.values()]
    for live in engine.live_requests(MAX_LISTED):
        trace = engine.trace(live.request_id, with_steps=False)
        if trace is not None:
            traces.append((trace.record, trace.events))
    body = await asyncio.to_thread(chrome_trace, steps, traces, time.monotonic() - seconds)
    headers = {"content-disposition": 'attachment; filename="streamllm.perfetto.json"'}
    return Response(body, media_type="application/json", headers=headers)


# -- rows ----------------------------------------------------------------------------------------------------


def _names(origins: RequestOrigins, engine_id: str) -> dict[str, Any]:
    origin = origins.of(engine_id)
    return {
        "id": engine_id,
        "response_id": None if origin is None else origin.response_id,
        "x_request_id": None if origin is None else origin.request_id,
        "path": None if origin is None else origin.path,
    }


def _live(origins: RequestOrigins, live: LiveRequest) -> dict[str, Any]:
    return {
        **_names(origins, live.request_id),
        "state": live.state,
        "finish_reason": None,
        "prompt_tokens": live.num_prompt_tokens,
        "cached_tokens": live.num_cached_tokens,
        "computed_tokens": live.num_computed_tokens,
        "generated_tokens": live.num_output_tokens,
        "sequences": live.num_sequences,
        "kv_blocks": live.num_blocks,
        "preemptions": live.num_preemptions,
        "adapter": live.adapter,
        "seconds": round(live.age, 3),
    }


def _ended(origins: RequestOrigins, record: RequestRecord) -> dict[str, Any]:
    return {
        **_names(origins, record.request_id),
        "state": "finished",
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "computed_tokens": None,
        "generated_tokens": record.num_generation_tokens,
        "sequences": record.num_choices,
        "kv_blocks": 0,
        "preemptions": record.num_preemptions,
        "adapter": record.adapter,
        "seconds": round(record.finished_time - record.arrival_time, 3),
    }


# -- a trace -------------------------------------------------------------------------------------------------


def _trace(trace: RequestTrace) -> dict[str, Any]:
    record = trace.record
    chunks = [event for event in trace.events if event.kind == "prefill"]
    return {
        "state": "finished" if trace.live is None else trace.live.state,
        "finish_reason": record.finish_reason or None,
        "summary": summary(trace),
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "computed_tokens": sum(event.num_tokens for event in chunks),
        "generated_tokens": record.num_generation_tokens,
        "choices": record.num_choices,
        "preemptions": record.num_preemptions,
        "adapter": record.adapter,
        "times_ms": {
            "tokenize": _between(record.arrival_time, record.queued_time),
            "queue": _ms(record.queue_seconds),
            "prefill": _ms(record.prefill_seconds),
            "time_to_first_token": _ms(record.time_to_first_token),
            "decode": _ms(record.decode_seconds),
            "per_output_token": _ms(record.seconds_per_token),
            "total": _between(record.arrival_time, record.finished_time),
        },
        "waited_ms": {reason: _ms(seconds) for reason, seconds in trace.waited.items()},
        "events": [_event(event, record.arrival_time) for event in trace.events],
        "steps": [_span(span, record.arrival_time) for span in trace.steps],
    }


def _event(event: Event, arrival_time: float) -> dict[str, Any]:
    row: dict[str, Any] = {"at_ms": _between(arrival_time, event.time), "event": event.kind}
    if event.kind in EVENT_TOKENS:
        row[EVENT_TOKENS[event.kind]] = event.num_tokens
    if event.detail:
        row["reason"] = event.detail
    if event.waited is not None:
        row["waited_ms"] = {reason: _ms(seconds) for reason, seconds in event.waited.items()}
    return row


def _span(span: StepSpan, arrival_time: float) -> dict[str, Any]:
    """One step, or the means over several."""
    return {
        "at_ms": _between(arrival_time, span.start),
        "steps": span.num_steps,
        "step_ms": _ms(span.seconds / span.num_steps),
        "batch_size": round(span.num_sequences / span.num_steps, 2),
        "tokens": round(span.num_tokens / span.num_steps, 2),
        "prompt_tokens": round(span.num_prompt_tokens / span.num_steps, 2),
    }


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else _ms(end - start)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def summary(trace: RequestTrace) -> str:
    """A trace in a sentence or two."""
    record = trace.record
    waited = sorted(trace.waited.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{reason} {_text(seconds)}" for reason, seconds in waited if seconds >= 0.0005)
    parts = [f"waited {_text(sum(trace.waited.values()))}" + (f" ({reasons})" if reasons else "")]
    if record.prefill_seconds is not None:
        chunks = [event.num_tokens for event in trace.events if event.kind == "prefill"]
        parts.append(
            f"{sum(chunks)} tokens computed in {len(chunks)} chunks, {record.num_cached_tokens} from the "
            f"cache, first token {_text(record.prefill_seconds)} after it left the queue"
        )
    if record.seconds_per_token is not None and record.decode_seconds is not None:
        parts.append(
            f"{record.num_generation_tokens} tokens in {_text(record.decode_seconds)}, one each "
            f"{_text(record.seconds_per_token)}"
        )
        num_steps = sum(span.num_steps for span in trace.steps)
        if num_steps:
            mean = sum(span.num_sequences for span in trace.steps) / num_steps
            parts.append(f"{mean:.1f} sequences a step on average")
    if record.num_preemptions:
        parts.append(f"preempted {record.num_preemptions} times")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
