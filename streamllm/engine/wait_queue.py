"""Sequences that wait to run, in order of service."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from streamllm.engine.request import SchedulingKey, Sequence


class WaitQueue:
    """A priority queue that sequences may also leave from the middle: O(log n) to enter, O(1) to leave.

    Attributes:
        num_tokens: uncomputed tokens of all that wait.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._waiting: dict[int, Sequence] = {}
        self._heap: list[tuple[SchedulingKey, int, Sequence]] = []
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
        while self._heap:
            sequence = self._heap[0][2]
            if self._waiting.get(sequence.sequence_id) is sequence:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take out the sequence that is served next; the queue must not be empty."""
        sequence = self.peek()
        assert sequence is not None
        heapq.heappop(self._heap)
        self.remove(sequence)
        return sequence
