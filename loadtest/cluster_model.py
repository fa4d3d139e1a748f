"""A cluster in simulated time: conversations, replicas with prefix caches, and the real routers between them.

Nothing here has text or tokens: a prompt is its length and the chain of hashes that
:func:`streamllm.deploy.prompt_prefix.prefix_hashes` would give.
"""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from streamllm.deploy.hash_ring import mixed
from streamllm.deploy.prefix_router import PrefixRouter
from streamllm.deploy.prompt_prefix import BOUNDARIES, MAX_HASHES

TOKEN_BYTES = 4
"""Of text, on average."""

POLICIES = {
    "prefix": "the router",
    "least loaded": "the router without prefixes: the less loaded of two",
    "random": "any replica",
}


@dataclass(frozen=True)
class Cluster:
    """What is simulated. Rates are a second; a replica's work is counted in tokens of prefill.

    Attributes:
        rate: requests of all clients.
        prefixes, zipf: how many system prompts there are, the k-th used in proportion to ``k ** -zipf``.
        prefix_tokens, user_tokens, output_tokens: mean lengths; uniform between half and three halves.
        turns: mean of a conversation, geometric.
        think_seconds: mean between an answer's end and the next turn. Short, so that a run of seconds sees
            many turns; caches are sized to it.
        cache_tokens: that a replica's prefix cache holds.
        prefill_rate: tokens that a replica computes.
        decode_cost: work of an output token, in tokens of prefill.
        routers: instances, each with what it has decided itself; a request comes to any of them.
        sticky: a conversation comes to the same router always.
        gossip: routers tell each other their decisions with every report.
        report_seconds: between two reports of a replica's load, which is as old on average as half of this.
        capacity: (prefix, holder) pairs that a router remembers.
    """

    replicas: int = 1000
    rate: float = 100_000
    prefixes: int = 20_000
    zipf: float = 1.1
    prefix_tokens: int = 1000
    user_tokens: int = 150
    output_tokens: int = 150
    turns: float = 5
    think_seconds: float = 2.0
    cache_tokens: int = 500_000
    prefill_rate: float = 80_000
    decode_cost: float = 1.5
    routers: int = 8
    sticky: bool = False
    gossip: bool = False
    report_seconds: float = 0.25
    capacity: int = 2_000_000  # enough for one router of them all
    load_ratio: float = 1.25
    load_slack: float = 4096

    @property
    def turn_work(self) -> float:
        """Of a turn whose history is cached."""
        return self.user_tokens + self.decode_cost * self.output_tokens


# -- traffic -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Conversation:
    """``hashes`` is the chain of the whole text so far, ``num_tokens`` its length."""

    key: int
    turns_left: int
    num_tokens: int
    hashes: list[int]

    def extend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.hashes.extend(chain(self.key, len(self.hashes), self.num_tokens))


def chain(key: int, start: int, num_tokens: int) -> Iterator[int]:
    """Hashes of a text of ``num_tokens`` that ``key`` decides from the ``start``-th on."""
    for index in range(start, bisect_right(BOUNDARIES, TOKEN_BYTES * num_tokens)):
        yield mixed(key * MAX_HASHES + index + 1)


class Traffic:
    """Turns of conversations in the order of time: an open loop of new ones, and their next turns."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(f"traffic {seed}")
        weights = (rank**-cluster.zipf for rank in range(1, cluster.prefixes + 1))
        self._cumulated = list(itertools.accumulate(weights))
        self._turns: list[tuple[float, int, Conversation]] = []
        self._next_start = 0.0
        self._num_started = 0
        self.now = 0.0

    def next_turn(self) -> Conversation:
        """The conversation whose next turn has come, its prompt complete; :attr:`now` becomes its time."""
        if self._turns and self._turns[0][0] <= self._next_start:
            self.now, _, conversation = heapq.heappop(self._turns)
        else:
            self.now = self._next_start
            self._next_start += self._random.expovariate(self._cluster.rate / self._cluster.turns)
            conversation = self._start()
        conversation.extend(self._length(self._cluster.user_tokens))
        return conversation

    def answered(self, conversation: Conversation, end: float, num_tokens: int) -> None:
        """The turn's answer has ended."""
        conversation.extend(num_tokens)
        conversation.turns_left -= 1
        if conversation.turns_left > 0:
            again = end + self._random.expovariate(1 / self._cluster.think_seconds)
            heapq.heappush(self._turns, (again, conversation.key, conversation))

    def output_length(self) -> int:
        return self._length(self._cluster.output_tokens)

    def _start(self) -> Conversation:
        rng = self._random
        self._num_started += 1
        prefix = bisect_left(self._cumulated, rng.random() * self._cumulated[-1])
        # The same for everyone who uses this system prompt.
        num_tokens = self._length(self._cluster.prefix_tokens, random.Random(prefix))
        turns_left = 1
        while rng.random() > 1 / self._cluster.turns:
            turns_left += 1
        key = self._cluster.prefixes + self._num_started
        return Conversation(key, turns_left, num_tokens, list(chain(prefix, 0, num_tokens)))

    def _length(self, mean: int, rng: random.Random | None = None) -> int:
        return round(mean * (0.5 + (rng or self._random).random()))


# -- replicas ------------------------------------------------------------------------------------------------


class PrefixCache:
    """The chunks that an engine holds, least recently used ones dropped, tails of a chain first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._chunks: OrderedDict[int, int] = OrderedDict()
        self._num_tokens = 0

    def num_cached(self, hashes: Sequence[int]) -> int:
        """Tokens of the longest cached prefix."""
        for index, value in enumerate(hashes):
            if value not in self._chunks:
                return BOUNDARIES[index - 1] // TOKEN_BYTES if index else 0
        return BOUNDARIES[len(hashes) - 1] // TOKEN_BYTES if hashes else 0

    def add(self, hashes: Sequence[int]) -> None:
        chunks = self._chunks
        for index in range(len(hashes) - 1, -1, -1):
            value = hashes[index]
            if value in chunks:
                chunks.move_to_end(value)
                continue
            num_tokens = (BOUNDARIES[index] - (BOUNDARIES[index - 1] if index else 0)) // TOKEN_BYTES
            chunks[value] = num_tokens
            self._num_tokens += num_tokens
        while self._num_tokens > self._capacity:
            self._num_tokens -= chunks.popitem(last=False)[1]


class Replica:
    """A queue served in order at a fixed rate of work."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.cache = PrefixCache(cluster.cache_tokens)
        self._free_at = 0.0
        self.work = 0.0

    def backlog(self, now: float) -> float:
        """Seconds of work queued."""
        return max(0.0, self._free_at - now)

    def serve(self, now: float, conversation: Conversation, num_output: int) -> tuple[int, float, float]:
        """(cached tokens of the prompt, time of the first token, time of the last)."""
        num_cached = self.cache.num_cached(conversation.hashes)
        prefill = conversation.num_tokens - num_cached
        work = prefill + self._cluster.decode_cost * num_output
        self.work += work
        first = now + self.backlog(now) + prefill / self._cluster.prefill_rate
        self._free_at = now + self.backlog(now) + work / self._cluster.prefill_rate
        return num_cached, first, self._free_at


# -- a run ---------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run has counted after its warm-up.

    Attributes:
        prompt_tokens, cached_tokens: of all prompts, and those found in the replica's cache.
        ideal_tokens: those that one engine with all replicas' memory would have found.
        first_token_seconds: of each request.
        backlogs: seconds of work queued, of every replica at each report.
        work: done by each replica, in tokens of prefill.
        seconds: simulated.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    backlogs: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    seconds: float = 0.0
    routers: list[PrefixRouter[int]] = field(default_factory=list)


def new_router(cluster: Cluster, seed: int) -> PrefixRouter[int]:
    router: PrefixRouter[int] = PrefixRouter(
        capacity=cluster.capacity,
        load_ratio=cluster.load_ratio,
        load_slack=cluster.load_slack,
        seed=seed,
    )
    for number in range(cluster.replicas):
        router.set_load(number, 0)
    return router


class Simulation:
    """One policy under one traffic.

    Args:
        policy: a key of ``POLICIES``.
        ideal: whether to follow the single engine too, which takes as much memory as all replicas.
    """

    def __init__(self, cluster: Cluster, policy: str, *, seed: int = 0, ideal: bool = False) -> None:
        self._cluster = cluster
        self._policy = policy
        self._random = random.Random(f"routers {seed}")
        self._traffic = Traffic(cluster, seed)
        self._replicas = [Replica(cluster) for _ in range(cluster.replicas)]
        self._routers = [new_router(cluster, seed + number) for number in range(cluster.routers)]
        self._ideal = PrefixCache(cluster.cache_tokens * cluster.replicas) if ideal else None
        self._decisions: list[tuple[int, list[int], int]] = []

    def run(self, num_requests: int, warm_up: float = 0.5) -> Outcome:
        """``num_requests`` turns, of which the first share ``warm_up`` only fills caches."""
        outcome = Outcome(routers=self._routers)
        next_report = self._cluster.report_seconds
        begin = int(num_requests * warm_up)
        for number in range(num_requests):
            conversation = self._traffic.next_turn()
            now = self._traffic.now
            if number == begin:
                outcome.seconds = -now
                outcome.work = [-replica.work for replica in self._replicas]
            while now >= next_report:
                backlogs = self._report(next_report)
                if number >= begin:
                    outcome.backlogs += backlogs
                next_report += self._cluster.report_seconds
            self._turn(conversation, now, outcome if number >= begin else None)
        outcome.seconds += self._traffic.now
        outcome.work = [
            before + replica.work for before, replica in zip(outcome.work, self._replicas, strict=True)
        ]
        return outcome

    def _turn(self, conversation: Conversation, now: float, outcome: Outcome | None) -> None:
        replica = self._replicas[self._choose(conversation)]
        num_prompt = conversation.num_tokens
        num_output = self._traffic.output_length()
        num_ideal = self._ideal.num_cached(conversation.hashes) if self._ideal else 0
        num_cached, first, end = replica.serve(now, conversation, num_output)
        if outcome is not None:
            outcome.prompt_tokens += num_prompt
            outcome.cached_tokens += num_cached
            outcome.ideal_tokens += num_ideal
            outcome.first_token_seconds.append(first - now)
        self._traffic.answered(conversation, end, num_output)
        for cache in (replica.cache, self._ideal):
            if cache is not None:
                cache.add(conversation.hashes)

    def _choose(self, conversation: Conversation) -> int:
        if self._policy == "random":
            return self._random.randrange(self._cluster.replicas)
        number = conversation.key if self._cluster.sticky else self._random.getrandbits(30)
        number %= len(self._routers)
        hashes = conversation.hashes if self._policy == "prefix" else ()
        replica = self._routers[number].choose(hashes, self._cluster.turn_work).replica
        if self._cluster.gossip:
            self._decisions.append((number, list(hashes), replica))
        return replica

    def _report(self, now: float) -> list[float]:
        """Every replica tells every router its load, and routers each other their decisions; returns the
        replicas' backlogs."""
        backlogs = [replica.backlog(now) for replica in self._replicas]
        for number, router in enumerate(self._routers):
            for replica, backlog in enumerate(backlogs):
                router.set_load(replica, backlog * self._cluster.prefill_rate)
            for origin, hashes, replica in self._decisions:
                if origin != number:
                    router.learn(hashes, replica)
        self._decisions.clear()
        return backlogs
