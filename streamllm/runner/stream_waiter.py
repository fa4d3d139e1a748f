"""Tells an event loop when a CUDA stream has come to some place."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch


class StreamWaiter:
    """A thread that waits for one place after the other, without the interpreter lock, and signals each.

    Args:
        event_fd: an eventfd, to which 1 is added for each place.
    """

    def __init__(self, event_fd: int):
        self._event_fd = event_fd
        self._places: queue.SimpleQueue[tuple[Any, Callable[[Exception], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="streamllm-stream", daemon=True)
        self._thread.start()

    def add(self, stream: torch.cuda.Stream, on_error: Callable[[Exception], None]) -> None:
        """Signals when the stream has done what was submitted to it so far.

        Args:
            on_error: called before the signal, on the thread, if the device failed.
        """
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        self._places.put((event, on_error))

    def close(self) -> None:
        """Ends the thread after what was added."""
        self._places.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (place := self._places.get()) is not None:
            event, on_error = place
            try:
                event.synchronize()
            except Exception as error:
                on_error(error)
            os.eventfd_write(self._event_fd, 1)
