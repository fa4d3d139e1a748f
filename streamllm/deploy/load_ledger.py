"""What each replica carries, from its own reports, which come late, and from what was sent to it, which is
known at once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

HORIZON = 30.0
"""Seconds for which it is remembered what was under way when; reports are not older."""

GRAIN = 0.05
"""Seconds within which changes count as one."""


@dataclass(slots=True)
class _Account:
    """One replica's.

    Attributes:
        own: cost of the requests of this process that are under way.
        others: what else the replica carries, as of its last report.
        report_time: of that report.
        history: (time, ``own`` from then on), oldest first.
    """

    own: float = 0.0
    others: float = 0.0
    report_time: float = float("-inf")
    history: deque[tuple[float, float]] = field(default_factory=deque)

    def change(self, cost: float, now: float) -> None:
        self.own = max(0.0, self.own + cost)
        if self.history and now - self.history[-1][0] < GRAIN:
            self.history[-1] = (self.history[-1][0], self.own)
        else:
            self.history.append((now, self.own))
        # The last one beyond the horizon stays: it says what was under way at its edge.
        while len(self.history) > 1 and self.history[1][0] < now - HORIZON:
            self.history.popleft()

    def own_at(self, time: float) -> float:
        """What was under way then; 0 before all that is known."""
        return next((own for start, own in reversed(self.history) if start <= time), 0.0)


class LoadLedger:
    """Loads of replicas, in the unit of the costs: tokens.

    A replica's load is the cost of this process's requests under way there, and what its last report named
    beyond those that were under way when it was made: other gateways' requests. So that two requests in the
    same moment are not both sent where nothing was a second ago.

    Times are of the wall clock, ``time.time()``: reports come from other machines.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def sent(self, replica: str, cost: float, now: float) -> None:
        """A request was sent to the replica."""
        self._accounts.setdefault(replica, _Account()).change(cost, now)

    def ended(self, replica: str, cost: float, now: float) -> None:
        """The answer to one has come, or will not come."""
        if replica in self._accounts:
            self._accounts[replica].change(-cost, now)

    def reported(self, replica: str, load: float, time: float) -> bool:
        """The replica's load at ``time``. Returns whether that is news."""
        account = self._accounts.setdefault(replica, _Account())
        if time <= account.report_time:
            return False
        account.report_time = time
        account.others = max(0.0, load - account.own_at(time))
        return True

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._accounts.pop(replica, None)

    def load(self, replica: str) -> float:
        """Of one that is not known: 0."""
        account = self._accounts.get(replica)
        return account.own + account.others if account else 0.0
