"""Prefix affinity behind Ray Serve's request-router interface."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# The module and not its DIRECTORY: Serve sends this module's content to other processes by value, and what it
# holds by name would be a copy there.
from streamllm.deploy import replicas as shared
from streamllm.deploy.load_ledger import LoadLedger
from streamllm.deploy.prefix_router import PrefixRouter
from streamllm.deploy.replicas import Replica, RoutingRequest


class PrefixAffinityRouter(RequestRouter):
    """Routes a :class:`RoutingRequest`, the first argument of a call, by :class:`PrefixRouter`.

    Loads are a :class:`LoadLedger`'s, which hears of requests from here and from the gateway, and from
    replicas by their ``record_routing_stats``: ``{"load": tokens, "time": seconds of the wall clock}``.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Called by Serve with ``request_router_kwargs``, the settings of :class:`PrefixRouter`."""
        self._prefixes: PrefixRouter[str] = PrefixRouter(**settings)
        self._ledger = LoadLedger()
        self._running: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with all replicas when one comes, goes, or has other figures."""
        super().update_replicas(replicas)
        self._running = {replica.replica_id.unique_id: replica for replica in replicas}
        for replica_id in [known for known in self._prefixes.replicas if known not in self._running]:
            self._prefixes.forget(replica_id)
            self._ledger.forget(replica_id)
        for replica_id, replica in self._running.items():
            report = replica.routing_stats or {}
            if self._ledger.reported(replica_id, report.get("load", 0.0), report.get("time", 0.0)):
                self._prefixes.set_load(replica_id, self._ledger.load(replica_id))
        shared.DIRECTORY.replicas = tuple(map(_described, self._running.values()))

    def _read_ended(self) -> None:
        """What the gateway's thread has left of requests that have ended."""
        now = time.time()
        while shared.DIRECTORY.ended:
            replica_id, cost = shared.DIRECTORY.ended.popleft()
            self._ledger.ended(replica_id, cost, now)
            if replica_id in self._running:
                self._prefixes.set_load(replica_id, self._ledger.load(replica_id))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica, or none yet: then Serve asks again a little later."""
        request = RoutingRequest()
        if pending_request is not None and pending_request.args:
            request = pending_request.args[0]
        self._read_ended()
        try:
            choice = self._prefixes.choose(request.hashes, request.cost, request.exclude)
        except LookupError:
            return []
        self._ledger.sent(choice.replica, request.cost, time.time())
        shared.DIRECTORY.counters = asdict(self._prefixes.stats)
        return [[self._running[choice.replica]]]


def _described(replica: RunningReplica) -> Replica:
    known = replica.replica_metadata
    return Replica(replica.replica_id.unique_id, known["host"], known["port"], known["rank"])
