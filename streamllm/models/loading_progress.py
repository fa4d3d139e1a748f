"""How far the weights have been read, for whoever waits for them."""

from __future__ import annotations

import logging
import time

from tqdm import tqdm

logger = logging.getLogger("streamllm.models")

MIB = 2**20


class LoadingProgress:
    """A bar while weights are read (only where stderr is a terminal), and one log line when they are there.

    Args:
        total_bytes: that will be read.
        show: whether there may be a bar.
    """

    def __init__(self, total_bytes: int, *, show: bool) -> None:
        self._start = time.perf_counter()
        self._num_bytes = 0
        self._bar = tqdm(
            total=total_bytes,
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            disable=None if show else True,
        )

    def add(self, num_bytes: int) -> None:
        """So many more bytes of the file have become weights."""
        self._num_bytes += num_bytes
        self._bar.update(num_bytes)

    def finish(self) -> None:
        """All weights are there."""
        seconds = time.perf_counter() - self._start
        logger.info(
            "read %.1f MiB of weights in %.2f s (%.0f MiB/s)",
            self._num_bytes / MIB, seconds, self._num_bytes / MIB / max(seconds, 1e-9),
        )  # fmt: skip

    def close(self) -> None:
        self._bar.close()
