"""How fast requests end, for the ``Retry-After`` of those that are turned away."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamllm.engine.stats import RequestRecord

WINDOW = 60.0
"""Seconds that are looked back, and the longest wait that is proposed (openai-python's own limit)."""


class Pace:
    """Remembers when requests were served to their end.

    Args:
        clock: seconds, as in :attr:`RequestRecord.finished_time`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=1000)

    def note(self, record: RequestRecord) -> None:
        """Count a request that has ended; what was aborted or failed says nothing about the pace."""
        if record.finish_reason in ("stop", "length"):
            self._times.append(record.finished_time)

    def retry_after(self, num_waiting: int) -> int:
        """Whole seconds, 1 to 60, in which those now waiting will have been served; 1 if no pace is known."""
        now = self._clock()
        while self._times and self._times[0] < now - WINDOW:
            self._times.popleft()
        if len(self._times) < 2:
            return 1
        seconds = num_waiting * (now - self._times[0]) / len(self._times)
        return min(max(math.ceil(seconds), 1), int(WINDOW))
