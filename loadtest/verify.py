"""``--verify``: are the answers under load those given to a single client, and is nothing left behind?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from streamllm.bench.client import Client, RequestFailure, Result
from streamllm.bench.prompts import Request

IDLE_WITHIN = 1.0
"""Seconds after the last answer within which the server must hold nothing."""


async def compare_alone(
    client: Client,
    requests: Sequence[Request],
    streamed: Sequence[Result],
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[dict[str, Any]]:
    """Send each request again, alone and not streamed, and compare it with its stream.

    Streams that failed are skipped, for they are reported already. Returns one entry a difference: the
    request's index, the ``field`` (text, finish_reason, completion_tokens, or error), ``streamed``,
    ``alone``, and for texts ``at``, the first character where they part.
    """
    differences = []
    for request, stream in zip(requests, streamed, strict=True):
        if stream.error is not None:
            continue
        alone = await client.complete(request)
        on_result(alone)
        if (difference := _difference(stream, alone)) is not None:
            differences.append({"index": request.index, **difference})
    return differences


def _difference(stream: Result, alone: Result) -> dict[str, Any] | None:
    if alone.error is not None:
        return {"field": "error", "streamed": None, "alone": str(alone.error)}
    if stream.text != alone.text:
        pairs = zip(stream.text, alone.text, strict=False)
        shorter = min(len(stream.text), len(alone.text))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        return {"field": "text", "at": at, "streamed": stream.text, "alone": alone.text}
    if stream.finish_reason != alone.finish_reason:
        return {"field": "finish_reason", "streamed": stream.finish_reason, "alone": alone.finish_reason}
    counts = stream.completion_tokens, alone.completion_tokens
    if None not in counts and counts[0] != counts[1]:
        return {"field": "completion_tokens", "streamed": counts[0], "alone": counts[1]}
    return None


async def check_idle(client: Client, within: float = IDLE_WITHIN) -> str | None:
    """Wait until the server's gauges say that nothing runs, nothing waits and no block is held.

    Returns ``None`` once they do, or after ``within`` seconds one line that says what is left.
    """
    deadline = time.perf_counter() + within
    while True:
        last_look = time.perf_counter() >= deadline
        try:
            held = {name: value for name, value in (await client.gauges()).items() if value != 0}
        except RequestFailure as failure:
            return f"cannot tell whether the server is idle: {failure}"
        if not held:
            return None
        if last_look:
            values = ", ".join(f"{name} {value:g}" for name, value in held.items())
            return f"the server is not idle {within:g} s after the last answer: {values}"
        await asyncio.sleep(min(0.05, within))
