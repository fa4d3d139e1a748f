"""How much of the traffic begins with which prefix, and so which prefixes are too hot for one replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

HEADROOM = 3.0
"""A prefix is hot from 1 / ``HEADROOM`` of a replica's mean share of the requests on: a replica is the home
of other prefixes besides, and homes are not spread evenly."""

WINDOW = 100
"""Requests a replica that a generation counts: a prefix at the limit has some 33."""

SMALLEST_WINDOW = 1000


class HotPrefix(NamedTuple):
    """The part of a request that is too hot for one replica.

    Attributes:
        length: of it, in hashes; 0 if there is none.
        num_replicas: that it needs; a power of two, so that routers agree and it seldom changes. 1 if there
            is none.
    """

    length: int
    num_replicas: int


class PrefixTraffic:
    """Counts requests by prefix, in two generations: the share of a prefix is that of the last one and the
    present one together.

    Of a request, the hot prefixes are counted and the first that is not: a longer one is not hotter. So
    memory is bounded by two windows' requests, some 100 bytes each.
    """

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._num_young = 0
        self._num_old = 0

    def count(self, hashes: Sequence[int], num_replicas: int) -> HotPrefix:
        """Counts a request, and says which part of it is hot among so many replicas."""
        young, old = self._young, self._old
        window = max(SMALLEST_WINDOW, WINDOW * num_replicas)
        self._num_young += 1
        # The first few requests say little about shares.
        num_requests = max(self._num_young + self._num_old, window // 4)
        length, needed = 0, 1.0
        for prefix in hashes:
            count = young[prefix] = young.get(prefix, 0) + 1
            replicas = HEADROOM * num_replicas * (count + old.get(prefix, 0)) / num_requests
            if replicas <= 1:
                break
            length += 1
            needed = replicas
        if self._num_young >= window:
            self._old, self._num_old = young, self._num_young
            self._young, self._num_young = {}, 0
        return HotPrefix(length, 1 << (math.ceil(needed) - 1).bit_length())
