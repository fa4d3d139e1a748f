"""Consistent hashing: every process maps a number to the same replica, and few numbers move with a change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from hashlib import blake2b
from typing import Generic, TypeVar

Item = TypeVar("Item")

POINTS = 64
"""Of each member on the ring: shares differ by an eighth (1 / sqrt(POINTS)) from the mean."""

_MASK = 2**64 - 1


class HashRing(Generic[Item]):
    """Members on a ring of 64-bit numbers; a number belongs to the member whose point follows it.

    D. Karger et al., Consistent Hashing and Random Trees, 1997. A change costs a pass over all points, paid
    once at the next look-up.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Item] = {}
        self._points: list[int] = []
        self._sorted = True

    def add(self, name: Hashable, item: Item) -> None:
        """A member; its places are decided by ``str(name)``."""
        for point in _points_of(name):
            self._owners[point] = item
            self._points.append(point)
        self._sorted = False

    def remove(self, name: Hashable) -> None:
        """The member of this name is gone.

        Raises:
            KeyError: there is none.
        """
        for point in _points_of(name):
            del self._owners[point]
        self._points = [point for point in self._points if point in self._owners]

    def owners(self, number: int, count: int) -> list[Item]:
        """The member to whom a number of 64 bits belongs and those that come next on the ring: ``count``
        different ones, or all there are."""
        if not self._sorted:
            self._points.sort()
            self._sorted = True
        points = self._points
        start = bisect_left(points, number)
        owners: list[Item] = []
        for index in range(start, start + len(points)):
            owner = self._owners[points[index % len(points)]]
            if owner not in owners:
                owners.append(owner)
                if len(owners) == count:
                    break
        return owners


def mixed(number: int) -> int:
    """64 bits that depend on all bits of a number (the finaliser of A. Appleby's MurmurHash3)."""
    number &= _MASK
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return number ^ number >> 33


def _points_of(name: Hashable) -> list[int]:
    text = str(name).encode("utf-8", "surrogatepass")
    digests = (blake2b(text, digest_size=8, salt=index.to_bytes(2, "little")) for index in range(POINTS))
    return [int.from_bytes(digest.digest(), "little") for digest in digests]
