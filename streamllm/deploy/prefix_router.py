"""Which replica serves a request: the one that has computed the longest part of its prompt, within bounds of
load.

A replica's prefix cache saves work only for requests that reach *that* replica. The router remembers which
replica it has sent which prefix to (:mod:`streamllm.deploy.prompt_prefix` makes the hashes), and sends a
request

1. to the holder of its longest known prefix, of several the earliest, unless that is overloaded; then to the
   next best holder,
2. else to the prefix's home: a replica that the hash alone decides, so that routers which know nothing of
   each other send the turns of one conversation to the same place; to its second home if the first has more
   than its part of the load and the second has less,
3. where both are overloaded, to the less loaded of two replicas taken at random.

A prefix that is too hot for one replica (a popular system prompt, :mod:`streamllm.deploy.prefix_traffic`) has
as many homes as its share of the traffic needs; what follows it in the request decides among them, and
holders are remembered of that only.

Overloaded is above the mean load by a factor and a slack (V. Mirrokni et al., Consistent Hashing with Bounded
Loads, 2016): against the mean, since one idle replica that has just started must not break everybody's
affinity. Two random choices: M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
What is remembered is bounded (:mod:`streamllm.deploy.holder_memory`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamllm.deploy.hash_ring import HashRing, mixed
from streamllm.deploy.holder_memory import HolderMemory
from streamllm.deploy.prefix_traffic import HotPrefix, PrefixTraffic

ReplicaId = TypeVar("ReplicaId", bound=Hashable)

PROBES = 8
"""Holders of one prefix that a decision looks at."""


@dataclass(frozen=True, slots=True)
class Choice(Generic[ReplicaId]):
    """A decision.

    Attributes:
        replica: where to send the request.
        num_matched: leading hashes of the request that this replica is believed to hold: it was sent them, or
            they are hot and it is one of their homes. 0 if it was chosen for its load or as the home of what
            is new.
    """

    replica: ReplicaId
    num_matched: int


@dataclass(slots=True)
class RouterStats:
    """Counters since the router began.

    Attributes:
        num_decisions: requests routed.
        num_hits: of these, to a replica that holds a prefix of theirs.
        num_spills: requests whose best holders were overloaded.
        num_hashes, num_matched: hashes of all requests, and of these, matched ones.
    """

    num_decisions: int = 0
    num_hits: int = 0
    num_spills: int = 0
    num_hashes: int = 0
    num_matched: int = 0


@dataclass(slots=True, eq=False)
class _Replica(Generic[ReplicaId]):
    """``number`` stands for it among holders and is never used again; ``place`` is its index in the list of
    all replicas."""

    id: ReplicaId
    number: int
    place: int
    load: float = 0


class PrefixRouter(Generic[ReplicaId]):
    """Decides where requests go. Not thread-safe; plain data, no clock, no I/O.

    Use: :meth:`set_load` for every replica when it appears and whenever it reports, :meth:`forget` when it
    is gone, :meth:`choose` for every request.

    Args:
        capacity: (prefix, holder) pairs remembered at most, some 80 bytes each. What a replica's cache holds
            takes one or two thousand. Twice in that many new pairs a decision takes longer, some 5 ms with
            this default.
        load_ratio: a replica is overloaded above ``load_ratio`` times the mean load ...
        load_slack: ... plus this, in the unit of loads (tokens queued and running, or requests).
        seed: of the random choices; the same calls then give the same decisions.

    Raises:
        ValueError: a capacity below 2, a ratio below 1 or a negative slack.
    """

    def __init__(
        self,
        *,
        capacity: int = 250_000,
        load_ratio: float = 1.25,
        load_slack: float = 4096,
        seed: int | None = None,
    ) -> None:
        if capacity < 2 or not load_ratio >= 1 or not load_slack >= 0:
            raise ValueError(
                "capacity must be at least 2, load_ratio at least 1 and load_slack at least 0, "
                f"got {capacity}, {load_ratio} and {load_slack}"
            )
        self._random = random.Random(seed)
        self._load_ratio = load_ratio
        self._load_slack = load_slack
        self._memory = HolderMemory(capacity)
        self._traffic = PrefixTraffic()
        self._ring: HashRing[_Replica[ReplicaId]] = HashRing()
        self._replicas: list[_Replica[ReplicaId]] = []
        self._by_id: dict[ReplicaId, _Replica[ReplicaId]] = {}
        self._by_number: dict[int, _Replica[ReplicaId]] = {}
        self._next_number = 0
        self._total_load: float = 0
        self._stats = RouterStats()

    # -- replicas --------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> Collection[ReplicaId]:
        """Those that requests may be sent to."""
        return self._by_id.keys()

    def load(self, replica: ReplicaId) -> float:
        """What the replica last reported and the cost of what was sent to it since.

        Raises:
            KeyError: an unknown replica.
        """
        return self._by_id[replica].load

    def set_load(self, replica: ReplicaId, load: float) -> None:
        """A replica's report: its load now. An unknown replica is one more to choose from; what was sent to
        it before the report counts as contained in it.

        Raises:
            ValueError: a load that is negative or not finite.
        """
        if not 0 <= load < math.inf:
            raise ValueError(f"a load must be finite and not negative, got {load} of {replica!r}")
        known = self._by_id.get(replica)
        if known is None:
            known = _Replica(replica, self._next_number, len(self._replicas))
            self._next_number += 1
            self._replicas.append(known)
            self._ring.add(replica, known)
            self._by_id[replica] = self._by_number[known.number] = known
        self._total_load += load - known.load
        known.load = load

    def forget(self, replica: ReplicaId) -> None:
        """The replica is gone or its cache is empty: nothing is sent to it, and it holds nothing, until its
        next :meth:`set_load`. Nothing happens if it is unknown."""
        gone = self._by_id.pop(replica, None)
        if gone is None:
            return
        # Its number stays in the memory until that is dropped, and stands for nobody.
        del self._by_number[gone.number]
        self._ring.remove(replica)
        last = self._replicas.pop()
        if last is not gone:
            self._replicas[gone.place] = last
            last.place = gone.place
        self._total_load -= gone.load

    # -- decisions -------------------------------------------------------------------------------------------

    def choose(
        self, hashes: Sequence[int], cost: float = 1.0, exclude: Collection[ReplicaId] = ()
    ) -> Choice[ReplicaId]:
        """The replica for a request; it counts as a holder of the request's prefixes from now on.

        Args:
            hashes: the chain of the request's prefixes, shortest first; none for a request without one.
            cost: what the request adds to the replica's load until that reports again.
            exclude: replicas not to choose (a retry elsewhere).

        Raises:
            LookupError: there is no replica besides the excluded ones.
        """
        hot = self._traffic.count(hashes, len(self._replicas))
        replica, num_matched = self._decide(hashes, hot, exclude)
        replica.load += cost
        self._total_load += cost
        self._memory.add(hashes[hot.length :], replica.number)
        stats = self._stats
        stats.num_decisions += 1
        stats.num_hits += num_matched > 0
        stats.num_hashes += len(hashes)
        stats.num_matched += num_matched
        return Choice(replica.id, num_matched)

    def learn(self, hashes: Sequence[int], replica: ReplicaId) -> None:
        """Another router has sent these prefixes to this replica; nothing happens if that is unknown."""
        known = self._by_id.get(replica)
        if known is not None:
            self._memory.add(hashes, known.number)

    @property
    def num_entries(self) -> int:
        """(prefix, holder) pairs remembered; at most the capacity."""
        return self._memory.num_entries

    @property
    def stats(self) -> RouterStats:
        """The counters, live."""
        return self._stats

    def _decide(
        self, hashes: Sequence[int], hot: HotPrefix, exclude: Collection[ReplicaId]
    ) -> tuple[_Replica[ReplicaId], int]:
        """The replica and the number of hashes that it is believed to hold.

        Raises:
            LookupError: there is none.
        """
        even = self._load_ratio * self._total_load / max(1, len(self._replicas))
        limit = even + self._load_slack
        spilled = False
        for length, numbers in self._memory.holders(hashes, hot.length):
            for replica in self._still_there(numbers[:PROBES], exclude):
                if replica.load <= limit:
                    self._stats.num_spills += spilled
                    return replica, length
                spilled = True
        self._stats.num_spills += spilled
        homes = [home for home in self._homes(hashes, hot) if home.load <= limit and home.id not in exclude]
        if not homes:
            return self._less_loaded_of_two(exclude), 0
        # What is new loses nothing elsewhere, so there is no slack for it.
        home = homes[0] if homes[0].load <= even else min(homes, key=lambda home: home.load)
        return home, hot.length

    def _still_there(
        self, numbers: Sequence[int], exclude: Collection[ReplicaId]
    ) -> Iterator[_Replica[ReplicaId]]:
        for number in numbers:
            replica = self._by_number.get(number)
            if replica is not None and replica.id not in exclude:
                yield replica

    def _homes(self, hashes: Sequence[int], hot: HotPrefix) -> list[_Replica[ReplicaId]]:
        """The replicas, two if there are as many, that every router takes for an unknown prefix: of a hot
        prefix one of its members, which the hash after it decides, or any if the request ends there."""
        if not hashes:
            return []
        place = hashes[hot.length] if hot.length < len(hashes) else self._random.getrandbits(64)
        if hot.length:
            place = mixed(hashes[hot.length - 1] + mixed(place) % hot.num_replicas)
        return self._ring.owners(place, 2)

    def _less_loaded_of_two(self, exclude: Collection[ReplicaId]) -> _Replica[ReplicaId]:
        """Raises LookupError where there is none."""
        replicas = self._replicas
        if exclude:
            replicas = [replica for replica in replicas if replica.id not in exclude]
        count = len(replicas)
        if count == 0:
            raise LookupError("there is no replica to send a request to")
        first = int(self._random.random() * count)
        if count == 1:
            return replicas[0]
        second = int(self._random.random() * (count - 1))
        second += second >= first
        return min(replicas[first], replicas[second], key=lambda replica: replica.load)
