"""A histogram that takes many equal values at once, which prometheus-client's does not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Histogram:
    """
    Args:
        bounds: upper bounds of the buckets, inclusive, ascending; one more takes what is larger.

    Attributes:
        sum: of all values.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value ``count`` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it) as prometheus-client's families take them; the last is ``+Inf``."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


def one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20 ... up to ``largest``."""
    bounds = []
    scale = 1
    while scale <= largest:
        bounds += [factor * scale for factor in (1, 2, 5) if factor * scale <= largest]
        scale *= 10
    return bounds
