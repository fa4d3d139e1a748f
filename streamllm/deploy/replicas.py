"""What the gateway knows of the replicas, and what it asks of whoever chooses among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine behind its own HTTP server.

    Attributes:
        id: unique among all that ever were.
        host, port: where it listens.
        rank: 0 to the number of replicas - 1; one that is rebuilt takes the rank of the one that was lost.
    """

    id: str
    host: str
    port: int
    rank: int

    @property
    def address(self) -> str:
        """Host and port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as the choice of its replica sees it.

    Attributes:
        hashes: of its prefixes, see :func:`streamllm.deploy.prompt_prefix.prefix_hashes`.
        cost: what it adds to a replica's load, in tokens, roughly.
        exclude: ids of replicas that it must not go to.
    """

    hashes: Sequence[int] = ()
    cost: float = 0.0
    exclude: Sequence[str] = ()


class Replicas(Protocol):
    """The replicas as they are now."""

    def all(self) -> Sequence[Replica]:
        """Those that run, as far as is known; some may have died just now."""
        ...

    async def choose(self, request: RoutingRequest) -> Replica:
        """The replica for a request. Waits, without end, until there is one that it may go to."""
        ...

    def ended(self, replica: Replica, request: RoutingRequest) -> None:
        """What was chosen for ``request`` has been answered, or will not be."""
        ...

    def counters(self) -> dict[str, int]:
        """Name -> how often since the start: what there is to count about choices."""
        ...


class ReplicaDirectory:
    """The replicas that this process may send requests to.

    Ray Serve makes the object that is told about replicas by itself, in a thread of its own, and hands it to
    nobody. What it and the gateway in the same process have to tell each other, they leave here.

    Attributes:
        replicas, counters: replaced as a whole, never changed.
        ended: (replica's id, cost) of requests that have ended, until they are taken.
    """

    def __init__(self) -> None:
        self.replicas: tuple[Replica, ...] = ()
        self.counters: dict[str, int] = {}
        self.ended: deque[tuple[str, float]] = deque()


DIRECTORY = ReplicaDirectory()
"""This process's."""
