"""The engine's ends of its workers' connections."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamllm.errors import EngineDeadError
from streamllm.runner.distributed.launchers import LaunchedWorker
from streamllm.runner.distributed.messages import Answer, Call
from streamllm.runner.distributed.transport import packed, receive_blocking, send_blocking

END_SECONDS = 5.0
"""What workers have to end by themselves."""

_MOMENT = 0.5
"""Seconds between the end of a worker's connections and the moment when its exit code is known, at most."""


class WorkerEnded(EngineDeadError):
    """A worker is gone, and with it a part of the model."""


@dataclass(frozen=True)
class WorkerLink:
    """A worker, as the engine sees it.

    Attributes:
        rank: its rank.
        launched: its process.
        machine: the name of its machine.
        calls, steps: its two connections.
    """

    rank: int
    launched: LaunchedWorker
    machine: str
    calls: socket.socket
    steps: socket.socket

    @property
    def name(self) -> str:
        return self.launched.name

    @property
    def host(self) -> str:
        """Its address, where others reach it."""
        peer = self.calls.getpeername()
        return peer[0] if isinstance(peer, tuple) else "127.0.0.1"


def how_it_ended(worker: LaunchedWorker) -> WorkerEnded:
    """Why there is no connection to a worker any more. Blocks for a moment, until that is known."""
    worker.wait(_MOMENT)
    return WorkerEnded(f"{worker.name} {worker.ending() or 'has closed its connection'}")


class WorkerCalls:
    """Calls a method of all workers and waits for all answers; from any thread, one at a time."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self._links = links
        self._lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What every worker answers, by rank.

        Raises:
            WorkerEnded: one of them is gone.
            Exception: what one of them raised; the others' answers are lost.
        """
        return self.call_each(method, [arguments] * len(self._links))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """:meth:`call` with each worker's own arguments; only the first as many workers are called."""
        messages: dict[int, bytes] = {}
        with self._lock:
            called = self._links[: len(arguments)]
            for link, own in zip(called, arguments, strict=True):
                # Most calls are the same for all, and an adapter is large.
                if id(own) not in messages:
                    messages[id(own)] = packed(Call(method, own))
                try:
                    send_blocking(link.calls, messages[id(own)])
                except OSError:
                    raise how_it_ended(link.launched) from None
            return self._answers(called)

    def _answers(self, links: Sequence[WorkerLink]) -> list[Any]:
        answers: dict[int, Any] = {}
        failure: Exception | None = None
        with selectors.DefaultSelector() as waiting:
            for link in links:
                waiting.register(link.calls, selectors.EVENT_READ, link)
            while waiting.get_map():
                for key, _ in waiting.select():
                    link = key.data
                    try:
                        answer: Answer = receive_blocking(link.calls)
                    except (EOFError, OSError):
                        raise how_it_ended(link.launched) from None
                    waiting.unregister(link.calls)
                    if answer.failure is not None:
                        failure = failure or answer.failure.unpacked(link.name)
                    answers[link.rank] = answer.value
                if failure is not None:
                    raise failure
        return [answers[link.rank] for link in links]


def end_workers(links: Sequence[WorkerLink], workers: Sequence[LaunchedWorker]) -> None:
    """Ends all workers: those that notice that their connections close, and the others."""
    for worker in workers:
        worker.end()
    for link in links:
        for connection in (link.calls, link.steps):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
    for worker in workers:
        worker.wait(END_SECONDS)
        if worker.ending() is None:
            worker.kill()
            worker.wait(END_SECONDS)
