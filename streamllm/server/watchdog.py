"""Ends a process whose event loop stands still."""

from __future__ import annotations

import faulthandler
import sys
import time

BEAT_INTERVAL = 1.0
"""Seconds between two moments when the loop shows that it lives."""


class Watchdog:
    """Unless :meth:`beat` is called often enough, all stacks go to standard error and the process exits (1).

    The waiting is done by faulthandler's own thread, which needs no interpreter lock: it works also while
    native code holds that lock for ever.

    Args:
        timeout: seconds that the loop may be silent; 0 switches the watchdog off.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._next_beat = 0.0

    def beat(self) -> None:
        """The loop lives. Cheap enough to be called at every turn."""
        now = time.monotonic()
        if self._timeout and now >= self._next_beat:
            self._next_beat = now + BEAT_INTERVAL
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=sys.stderr)

    def end_within(self, seconds: float) -> None:
        """The process is ending: it must be gone in so many seconds, beats or not."""
        self._next_beat = float("inf")
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)

    def stop(self) -> None:
        """There is nothing to watch any more: the process may live on."""
        self._next_beat = float("inf")
        faulthandler.cancel_dump_traceback_later()
