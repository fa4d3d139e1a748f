"""A line of throughput in the log while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.stats import EngineStats

logger = logging.getLogger("streamllm.server")

INTERVAL = 10.0
"""Seconds between two lines."""


async def log_stats(engine: AsyncEngine, interval: float = INTERVAL) -> None:
    """Log a line every ``interval`` seconds in which something ran or waits; never returns."""
    before, before_time = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, now_time = engine.stats(), time.monotonic()
        line = describe(before, now, now_time - before_time)
        if line is not None:
            logger.info(line)
        before, before_time = now, now_time


def describe(before: EngineStats, now: EngineStats, seconds: float) -> str | None:
    """The line for the time between two snapshots; ``None`` if there was no work."""
    prompt = now.prompt_tokens - before.prompt_tokens
    generation = now.generation_tokens - before.generation_tokens
    if not (prompt or generation or now.num_running or now.num_waiting):
        return None
    line = (
        f"prompt {prompt / seconds:.1f} tok/s, generation {generation / seconds:.1f} tok/s, "
        f"running {now.num_running}, waiting {now.num_waiting}, KV usage {100 * now.kv_usage:.1f}%"
    )
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    if queries:
        hits = now.prefix_cache_hits - before.prefix_cache_hits
        line += f", prefix cache hits {100 * hits / queries:.1f}%"
    return line
