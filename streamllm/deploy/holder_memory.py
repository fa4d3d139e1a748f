"""Which replica holds which prefix, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class HolderMemory:
    """Prefix hash -> numbers of the replicas that hold it, kept in two generations.

    The young generation notes who serves a prefix from its beginning on. When it is full it becomes the old
    one, whose predecessor is dropped. So what is forgotten has not been used for the last ``capacity / 2``
    entries, and of a prefix that was hot once only those holders remain that its traffic still needs: the
    young ones are asked first, and an old one is used again only if they are overloaded.

    Args:
        capacity: (prefix, holder) pairs at most; at least 2.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._young: dict[int, tuple[int, ...]] = {}
        self._old: dict[int, tuple[int, ...]] = {}
        self._num_young = 0
        self._num_old = 0
        # Most prefixes have one holder: each holder's tuple exists once.
        self._alone: dict[int, tuple[int, ...]] = {}

    @property
    def num_entries(self) -> int:
        """Pairs remembered."""
        return self._num_young + self._num_old

    def holders(self, hashes: Sequence[int], longer_than: int = 0) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(length of a prefix in hashes, its holders in the order in which they came), the longest prefix
        first, of each the young holders before the old; the same holders twice in a row are given once."""
        young, old = self._young, self._old
        last: tuple[int, ...] = ()
        for index in range(len(hashes) - 1, longer_than - 1, -1):
            for generation in (young, old):
                found = generation.get(hashes[index])
                if found is not None and found != last:
                    last = found
                    yield index + 1, found

    def add(self, hashes: Sequence[int], holder: int) -> None:
        """``holder`` holds these prefixes now."""
        young = self._young
        alone = self._alone.setdefault(holder, (holder,))
        for prefix in hashes:
            known = young.get(prefix)
            if known is None:
                young[prefix] = alone
            elif holder in known:
                continue
            else:
                young[prefix] = (*known, holder)
            self._num_young += 1
            if self._num_young >= self._half:
                self._begin_generation()
                young = self._young

    def _begin_generation(self) -> None:
        self._old, self._num_old = self._young, self._num_young
        self._young, self._num_young = {}, 0
        self._alone = {}
