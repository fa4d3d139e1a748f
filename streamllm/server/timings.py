"""A request's times in its answer, under vLLM's name ``metrics`` (``--enable-per-request-metrics``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamllm.engine.stream import RequestStream


def timings(streams: Sequence[RequestStream]) -> dict[str, float | None]:
    """Milliseconds, and tokens a second, of the requests behind one response; ``None`` where a stage was not
    reached.

    Several prompts count as one: from the first arrival to the last token. ``queue_time_ms``: until the first
    one was scheduled. ``prefill_time_ms``: from there to the first token. ``generation_time_ms``: from the
    first token to the last. ``mean_itl_ms``: per token of one choice after its first. ``tokens_per_second``:
    all generated tokens over prefill and generation.
    """
    metrics = [stream.metrics for stream in streams]
    arrival = min(m.arrival_time for m in metrics)
    scheduled = min((t for m in metrics if (t := m.first_scheduled_time) is not None), default=None)
    first = min((t for m in metrics if (t := m.first_token_time) is not None), default=None)
    last = max((t for m in metrics if (t := m.last_token_time) is not None), default=None)
    num_tokens = sum(stream.num_pushed_tokens for stream in streams)
    num_gaps = num_tokens / sum(stream.num_choices for stream in streams) - 1
    generation = _milliseconds(first, last)
    busy = _milliseconds(scheduled, last)
    return {
        "queue_time_ms": _milliseconds(arrival, scheduled),
        "prefill_time_ms": _milliseconds(scheduled, first),
        "time_to_first_token_ms": _milliseconds(arrival, first),
        "generation_time_ms": generation,
        "mean_itl_ms": round(generation / num_gaps, 3) if generation is not None and num_gaps > 0 else None,
        "tokens_per_second": round(1000 * num_tokens / busy, 2) if busy else None,
    }


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1000 * (end - start), 3)
