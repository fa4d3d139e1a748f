"""A reader of ``/engine/events`` that keeps what it was told, as the page does."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """(name, data) of each event."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


class Follower:
    """
    Attributes:
        states: of each block, as the stream has them.
        tables: (sequence, KV group) -> blocks.
        names: sequence -> (request, choice).
        copies: copies on write, as (source, copy).
        overviews: all that came.
        num_snapshots: how many came.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._events = read_events(response.iter_lines())
        self.states: list[int] = []
        self.tables: dict[tuple[int, int], list[int]] = {}
        self.names: dict[int, tuple[str, int]] = {}
        self.copies: list[list[int]] = []
        self.overviews: list[dict[str, Any]] = []
        self.num_snapshots = 0
        self.ended = False

    def step(self) -> str:
        """Takes in one event and returns its name."""
        name, data = next(self._events)
        if name == "snapshot":
            self.num_snapshots += 1
            self.states = [-1] * data["num_blocks"]
            self.tables, self.names = {}, {}
        if name in ("snapshot", "blocks"):
            self._take(data)
        elif name == "overview":
            self.overviews.append(data)
        elif name == "end":
            self.ended = True
        return name

    def _take(self, news: dict[str, Any]) -> None:
        self.copies += news["copies"]
        for first, count, state in news["runs"]:
            self.states[first : first + count] = [state] * count
        for sequence in news["gone"]:
            del self.names[sequence]
            self.tables = {key: table for key, table in self.tables.items() if key[0] != sequence}
        for sequence, request, choice in news["sequences"]:
            assert sequence not in self.names
            self.names[sequence] = (request, choice)
        for sequence, group, first, blocks in news["tables"]:
            table = self.tables.setdefault((sequence, group), [])
            assert sequence in self.names and first <= len(table)
            table[first:] = blocks

    def owners(self) -> dict[int, set[int]]:
        """Block -> sequences that hold it."""
        owners = defaultdict(set)
        for (sequence, _), table in self.tables.items():
            for block in table:
                owners[block].add(sequence)
        owners.pop(-1, None)
        return dict(owners)
