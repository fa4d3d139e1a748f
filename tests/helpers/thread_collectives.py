"""Ranks of a group as threads of a process (the protocol :class:`streamllm.ops.collectives.Collectives`)."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds that a rank waits for the others: a test whose ranks disagree fails, it does not hang."""


class ThreadGroup:
    """What the ranks of one group share."""

    def __init__(self, size: int, timeout: float = TIMEOUT):
        self.size = size
        self.timeout = timeout
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.tensors: list[Tensor | None] = [None] * size
        self.mail: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.closed = threading.Event()

    def rank(self, rank: int) -> ThreadCollectives:
        """The group as that rank sees it."""
        return ThreadCollectives(self, rank)

    def close(self) -> None:
        """Fails all waiting calls."""
        self.closed.set()
        self.barrier.abort()


class ThreadCollectives:
    """One rank. Calls from any one thread at a time: its own, or the driver of its plans."""

    def __init__(self, group: ThreadGroup, rank: int):
        self.rank, self.size = rank, group.size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        """Name and shape of each call so far."""
        self._group = group

    def all_reduce(self, tensor: Tensor) -> None:
        total = torch.zeros_like(tensor)
        for part in self._exchange("all_reduce", tensor):
            total += part
        tensor.copy_(total)

    def gather_columns(self, tensor: Tensor, out: Tensor, widths: Sequence[int]) -> None:
        assert tensor.shape[1] == widths[self.rank], (tensor.shape, widths)
        out.copy_(torch.cat(self._exchange("gather_columns", tensor), dim=1))

    def send(self, tensor: Tensor, rank: int) -> None:
        self.calls.append(("send", tuple(tensor.shape)))
        self._group.mail[self.rank, rank].put(tensor.clone())

    def receive(self, tensor: Tensor, rank: int) -> None:
        self.calls.append(("receive", tuple(tensor.shape)))
        sent = self._group.mail[rank, self.rank].get(timeout=self._group.timeout)
        assert sent.shape == tensor.shape, f"{tuple(tensor.shape)} awaited, {tuple(sent.shape)} sent"
        tensor.copy_(sent)

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of the ranks."""
        self.calls.append((name, tuple(tensor.shape)))
        self._group.tensors[self.rank] = tensor.clone()
        self._group.barrier.wait()
        tensors = [part for part in self._group.tensors if part is not None]
        self._group.barrier.wait()
        return tensors


def run_ranks(size: int, function: Callable[[ThreadCollectives], T], timeout: float = TIMEOUT) -> list[T]:
    """``function`` for every rank at once; what it returns, by rank. An error ends the others' waits."""
    group = ThreadGroup(size, timeout)
    with ThreadPoolExecutor(size) as threads:
        futures: list[Future[T]] = [threads.submit(function, group.rank(rank)) for rank in range(size)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in done if future.exception() is not None]
        if failed:
            group.close()
            raise failed[0].exception()  # type: ignore[misc]
        return [future.result() for future in futures]
