"""The engine as somebody sees it who looks several times a second: blocks, their holders, requests, figures.

It exists while somebody looks. What it costs is the time of its methods, on the event loop between steps; the
engine does nothing for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from streamllm.engine.block_pool import BlockPool
from streamllm.engine.block_watch import BlockWatch, Run
from streamllm.engine.events import EventLog
from streamllm.engine.live_requests import LiveRequest, live_requests
from streamllm.engine.request import Request, Sequence
from streamllm.engine.stats import EngineStats

MAX_REQUESTS = 200
"""Requests that are shown, the oldest first."""


@dataclass(slots=True)
class BlockNews:
    """What a watcher must be told of the blocks.

    Attributes:
        runs: blocks whose state is now another.
        sequences: those that hold blocks for the first time: id, request, number of the choice.
        tables: entries of block tables that are new: sequence, KV group, place of the first entry, and the
            blocks from there to the table's end (-1 where one has left the group's window).
        gone: sequences that hold no blocks any more.
        copies: copies on write, as (source, copy).
    """

    runs: list[Run] = field(default_factory=list)
    sequences: list[tuple[int, str, int]] = field(default_factory=list)
    tables: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs or self.sequences or self.tables or self.gone or self.copies)


@dataclass(slots=True)
class Overview:
    """Queues, memory and speed.

    Attributes:
        time: seconds of ``time.monotonic()``.
        requests: the oldest :data:`MAX_REQUESTS` that wait or run, of ``num_requests``.
        ttft: seconds from queue to first token, the mean of those that came since the last overview; ``None``
            if none did.
        itl: seconds between two tokens of a sequence, the mean over what was generated since.
        stats: the engine's own figures.
        waste, sharing: shares of :class:`MemoryFigures`.
    """

    time: float
    requests: list[LiveRequest]
    num_requests: int
    ttft: float | None
    itl: float | None
    waste: float
    sharing: float
    stats: EngineStats


@dataclass(slots=True)
class _Seen:
    """A sequence's block tables as they were last told."""

    request_id: str
    choice_index: int
    tables: list[list[int]]


class EngineWatch:
    """
    Args:
        pool: the KV blocks.
        requests: those that wait or run, the oldest first.
        stats: the engine's figures.
        events: what happens to requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        requests: Callable[[], Iterable[Request]],
        stats: Callable[[], EngineStats],
        events: EventLog,
    ) -> None:
        self._pool = pool
        self._blocks = BlockWatch(pool)
        self._num_copies = pool.num_copies
        self._requests = requests
        self._stats = stats
        self._seen: dict[int, _Seen] = {}
        self._latency = _Latency(events)

    def look(self) -> BlockNews:
        """What has changed since the last look."""
        news = BlockNews(self._blocks.look(), copies=self._new_copies())
        holding = {each.sequence_id: each for each in self._holders()}
        for sequence_id in self._seen.keys() - holding.keys():
            news.gone.append(sequence_id)
            del self._seen[sequence_id]
        for sequence_id, sequence in holding.items():
            self._compare(sequence_id, sequence, news)
        return news

    def snapshot(self) -> BlockNews:
        """Everything, as it was at the last look: what follows are the news of the next."""
        snapshot = BlockNews(self._blocks.all())
        for sequence_id, seen in self._seen.items():
            snapshot.sequences.append((sequence_id, seen.request_id, seen.choice_index))
            snapshot.tables += [(sequence_id, group, 0, list(ids)) for group, ids in enumerate(seen.tables)]
        return snapshot

    def overview(self) -> Overview:
        """Requests and figures as they are now."""
        now, requests = time.monotonic(), list(self._requests())
        stats = self._stats()
        return Overview(
            time=now,
            requests=list(live_requests(islice(requests, MAX_REQUESTS), now)),
            num_requests=len(requests),
            ttft=self._latency.first_tokens(),
            itl=self._latency.between_tokens(requests),
            waste=stats.memory.waste,
            sharing=stats.memory.sharing,
            stats=stats,
        )

    def _new_copies(self) -> list[tuple[int, int]]:
        """Those since the last look that the pool still remembers."""
        count, self._num_copies = self._pool.num_copies - self._num_copies, self._pool.num_copies
        return list(self._pool.copies)[-count:] if count else []

    def _holders(self) -> Iterator[Sequence]:
        for request in self._requests():
            for sequence in request.sequences:
                if any(table.block_ids for table in sequence.blocks.tables):
                    yield sequence

    def _compare(self, sequence_id: int, sequence: Sequence, news: BlockNews) -> None:
        seen = self._seen.get(sequence_id)
        if seen is None:
            tables: list[list[int]] = [[] for _ in sequence.blocks.tables]
            seen = _Seen(sequence.request.request_id, sequence.choice_index, tables)
            self._seen[sequence_id] = seen
            news.sequences.append((sequence_id, seen.request_id, seen.choice_index))
        for group, table in enumerate(sequence.blocks.tables):
            before, now = seen.tables[group], table.block_ids
            if before == now:
                continue
            first = _first_difference(before, now)
            news.tables.append((sequence_id, group, first, now[first:]))
            seen.tables[group] = list(now)


def _first_difference(before: list[int], now: list[int]) -> int:
    """Where two tables part; by halves, since comparing slices is quick and most tables only grow."""
    low, high = 0, min(len(before), len(now))
    if before[:high] == now[:high]:
        return high
    while low < high:
        middle = (low + high) // 2
        if before[low : middle + 1] == now[low : middle + 1]:
            low = middle + 1
        else:
            high = middle
    return low


class _Latency:
    """Means of what was waited for since they were last asked."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._queued: dict[str, float] = {}
        self._last_tokens: dict[str, tuple[float, int]] = {}
        _, self._next_event = events.since(0)

    def first_tokens(self) -> float | None:
        """Seconds from queue to first token of the requests whose first token has come."""
        events, self._next_event = self._events.since(self._next_event)
        waited = []
        for event in events:
            if event.kind == "queued":
                self._queued[event.request_id] = event.time
            elif event.kind == "first_token" and event.request_id in self._queued:
                waited.append(event.time - self._queued.pop(event.request_id))
            elif event.kind == "finished":
                self._queued.pop(event.request_id, None)
        return sum(waited) / len(waited) if waited else None

    def between_tokens(self, requests: Iterable[Request]) -> float | None:
        """Seconds between the tokens of a sequence, over requests that are live and had been before."""
        last_tokens = {}
        seconds, tokens = 0.0, 0
        for request in requests:
            last = request.metrics.last_token_time
            if last is None:
                continue
            count = sum(sequence.num_output_tokens for sequence in request.sequences)
            last_tokens[request.request_id] = (last, count)
            before = self._last_tokens.get(request.request_id)
            if before is not None and count > before[1]:
                seconds += (last - before[0]) * len(request.sequences)
                tokens += count - before[1]
        self._last_tokens = last_tokens
        return seconds / tokens if tokens else None
