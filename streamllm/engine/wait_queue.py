"""Sequences that wait to run, in order of service; some may be set aside for a while."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from streamllm.engine.request import SchedulingKey, Sequence

_Entry = tuple[SchedulingKey, int, Sequence]


class WaitQueue:
    """A priority queue that sequences may also leave from the middle: O(log n) to enter, O(1) to leave.

    A parked sequence waits like any other, and may leave, but is not served before it is unparked.

    Attributes:
        num_tokens: uncomputed tokens of all that wait.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._waiting: dict[int, Sequence] = {}
        self._heap: list[_Entry] = []
        self._parked: dict[bytes, list[_Entry]] = {}
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.sequence_id] = sequence
        self.num_tokens += sequence.num_uncomputed_tokens
        # The number of the push: a sequence that left from the middle and came back stands here twice.
        self._num_pushes += 1
        heapq.heappush(self._heap, (sequence.key, self._num_pushes, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Its heap entry is dropped when it comes up."""
        del self._waiting[sequence.sequence_id]
        self.num_tokens -= sequence.num_uncomputed_tokens

    def peek(self) -> Sequence | None:
        """The sequence that is served next."""
        return self._first(self._heap)

    def pop(self) -> Sequence:
        """Take out the sequence that is served next; the queue must not be empty."""
        sequence = self.peek()
        assert sequence is not None
        heapq.heappop(self._heap)
        self.remove(sequence)
        return sequence

    @property
    def has_parked(self) -> bool:
        """Whether any sequence is parked, or was when it left."""
        return bool(self._parked)

    @property
    def num_parked(self) -> int:
        """Sequences that are parked."""
        parked = {entry[2].sequence_id for heap in self._parked.values() for entry in heap}
        return len(parked & self._waiting.keys())

    def park(self, name: bytes) -> None:
        """Set the sequence that is served next aside, to those parked under the same name."""
        assert self.peek() is not None
        heapq.heappush(self._parked.setdefault(name, []), heapq.heappop(self._heap))

    def unpark(self, name: bytes) -> None:
        """Put all that are parked under a name, if any, back to where their keys put them."""
        for entry in self._parked.pop(name, ()):
            heapq.heappush(self._heap, entry)

    def parked(self) -> list[tuple[bytes, Sequence]]:
        """Each name with the first of the sequences parked under it, in the order of these."""
        firsts = [(name, self._first(heap)) for name, heap in self._parked.items()]
        for name, sequence in firsts:
            if sequence is None:
                del self._parked[name]
        live = [(name, sequence) for name, sequence in firsts if sequence is not None]
        return sorted(live, key=lambda entry: entry[1].key)

    def _first(self, heap: list[_Entry]) -> Sequence | None:
        while heap:
            sequence = heap[0][2]
            if self._waiting.get(sequence.sequence_id) is sequence:
                return sequence
            heapq.heappop(heap)
        return None
