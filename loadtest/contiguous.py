"""KV memory as servers before PagedAttention kept it: one contiguous piece a sequence, reserved in full when
the sequence starts. These are the paper's three variants of Orca (section 6.1).

They are treated kindly: pieces are placed first fit at any slot (the paper assumes a buddy allocator, which
fragments more), a prompt of any length is computed in one step, and nothing else limits the batch.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from figures import Average, Figures, Window

from streamllm.bench.traces import MAX_LENGTH, Lengths


class ContiguousMemory:
    """Slots ``0..num_slots - 1``, given out in contiguous pieces, first fit; neighbouring holes merge."""

    def __init__(self, num_slots: int) -> None:
        self._holes = [(0, num_slots)]  # (start, length), by start

    def reserve(self, count: int) -> int | None:
        """The first slot of a piece of ``count``, or ``None`` if no hole is that long."""
        for index, (start, length) in enumerate(self._holes):
            if length >= count:
                rest = [(start + count, length - count)] if length > count else []
                self._holes[index : index + 1] = rest
                return start
        return None

    def release(self, start: int, count: int) -> None:
        """Give a piece back."""
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (start, count)]):
            if merged and sum(merged[-1]) == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._holes = merged


Reservation = Callable[[Lengths], int]
"""How many slots one sequence of a request reserves."""


def reserve_maximum(lengths: Lengths) -> int:
    """The model's longest sequence, whatever comes."""
    return MAX_LENGTH


def reserve_power_of_two(lengths: Lengths) -> int:
    """The prompt, and for the output the next power of two: too much by at most a factor of two."""
    return min(lengths.prompt + (1 << (lengths.output - 1).bit_length()), MAX_LENGTH)


def reserve_exactly(lengths: Lengths) -> int:
    """The final length, as if it were known."""
    return lengths.prompt + lengths.output


RESERVATIONS: dict[str, Reservation] = {
    "maximum": reserve_maximum,
    "power of two": reserve_power_of_two,
    "oracle": reserve_exactly,
}


@dataclass(slots=True)
class _Piece:
    starts: list[int]
    size: int
    lengths: Lengths


def run_contiguous(
    requests: Sequence[Lengths], copies: int, reservation: Reservation, num_slots: int, window: Window
) -> Figures:
    """Serve all requests first come, first served, each with ``copies`` sequences (samples or beams) that
    share nothing. A step computes one token of every sequence, or its whole prompt."""
    memory, waiting = ContiguousMemory(num_slots), deque(requests)
    running: list[tuple[int, int, _Piece]] = []
    average = Average()
    step = used = reserved = finished = 0
    while waiting or running:
        used += copies * len(running)
        while running and running[0][0] == step:
            _, _, piece = heapq.heappop(running)
            for start in piece.starts:
                memory.release(start, piece.size)
            reserved -= copies * piece.size
            used -= copies * (piece.lengths.prompt + piece.lengths.output)
            finished += 1
        while waiting and (starts := _reserve_all(memory, copies, reservation(waiting[0]))) is not None:
            lengths = waiting.popleft()
            piece = _Piece(starts, reservation(lengths), lengths)
            # The last token is never computed, so that an output takes as many steps as it has tokens.
            heapq.heappush(running, (step + lengths.output, len(waiting), piece))
            reserved += copies * piece.size
            used += copies * lengths.prompt
        if waiting and not running:
            raise ValueError(f"{copies} sequences of {reservation(waiting[0])} slots never fit")
        if window.is_open(finished, len(waiting)):
            average.add(
                waste=1 - used / reserved,
                used=used / num_slots,
                requests=len(running),
                sequences=copies * len(running),
                sharing=0.0,
            )
        step += 1
    return average.figures(num_steps=step - 1, num_preemptions=0, recomputed=0.0)


def _reserve_all(memory: ContiguousMemory, copies: int, size: int) -> list[int] | None:
    starts: list[int] = []
    for _ in range(copies):
        start = memory.reserve(size)
        if start is None:
            for taken in starts:
                memory.release(taken, size)
            return None
        starts.append(start)
    return starts
