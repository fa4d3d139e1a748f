"""What the memory benchmark measures, alike for every allocator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run that counts: somebody waits for memory, and the first requests, which all began at
    once, no longer set the pace.

    Attributes:
        warm_up: requests that must have finished before.
    """

    warm_up: int

    def is_open(self, num_finished: int, num_waiting: int) -> bool:
        return num_finished >= self.warm_up and num_waiting > 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Averages over the steps of a window.

    Attributes:
        waste: share of the allocated slots that hold no token.
        used: share of all slots that hold a token.
        requests, sequences: how many run at once.
        sharing: share of blocks saved, 1 - physical / logical.
        num_steps: of the whole run, until every request is done.
        num_preemptions: in the whole run.
        recomputed: share of all tokens computed that had been computed before, and lost in a preemption.
    """

    waste: float
    used: float
    requests: float
    sequences: float
    sharing: float
    num_steps: int
    num_preemptions: int
    recomputed: float


class Average:
    """Means of named quantities over the steps noted."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._count = 0

    def add(self, **values: float) -> None:
        """Note one step."""
        for name, value in values.items():
            self._sums[name] += value
        self._count += 1

    def figures(self, *, num_steps: int, num_preemptions: int, recomputed: float) -> Figures:
        """
        Raises:
            ValueError: no step was noted: there were too few requests to fill the memory.
        """
        if not self._count:
            raise ValueError("the memory was never full; use more requests or a smaller pool")
        means = {name: total / self._count for name, total in self._sums.items()}
        return Figures(**means, num_steps=num_steps, num_preemptions=num_preemptions, recomputed=recomputed)
