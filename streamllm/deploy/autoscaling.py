"""How many replicas a load needs: more when prompts queue up or first tokens come late, fewer when the others
can carry what runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_GROWTH = 2.0
"""Times as many replicas that one decision may ask for: what came late does not say by how much more."""

LOW_USE = 0.6
"""Share of the running sequences' places, on one replica fewer, up to which there may be one fewer."""

LOW_FIRST_TOKEN = 0.5
"""Share of the time that first tokens may take, up to which there may be one replica fewer."""


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """One replica, in the mean over the last while.

    Attributes:
        queued_tokens: of prompts in its queue.
        running_share: running sequences as a share of ``max_num_seqs``.
        first_token: seconds from arrival to the first token; 0 if there was none.
    """

    queued_tokens: float
    running_share: float
    first_token: float


def wanted_replicas(
    num_replicas: int, uses: Sequence[ReplicaUse], *, target_queued_tokens: float, target_first_token: float
) -> int:
    """How many replicas there should be.

    Args:
        num_replicas: there are, those that are starting included.
        uses: of the replicas that have reported.
        target_queued_tokens: prompt tokens that may wait at each.
        target_first_token: seconds that first tokens may take.
    """
    if not uses:
        return num_replicas
    queued = sum(use.queued_tokens for use in uses)
    late = [use.first_token for use in uses if use.first_token]
    first_token = sum(late) / len(late) if late else 0.0
    # Those that are starting will take their part of the queue, but cannot have shortened any wait yet.
    pressure = queued / (num_replicas * target_queued_tokens)
    if len(uses) >= num_replicas:
        pressure = max(pressure, first_token / target_first_token)
    if pressure > 1:
        return math.ceil(num_replicas * min(pressure, MOST_GROWTH))
    running = sum(use.running_share for use in uses)
    is_idle = queued == 0 and first_token <= LOW_FIRST_TOKEN * target_first_token
    if num_replicas > 1 and is_idle and running <= LOW_USE * (num_replicas - 1):
        return num_replicas - 1
    return num_replicas


class QueuePolicy:
    """:func:`wanted_replicas` as Ray Serve's autoscaling policy; the bounds and delays are Serve's."""

    def __init__(self, target_queued_tokens: float, target_first_token: float) -> None:
        self._targets = {
            "target_queued_tokens": target_queued_tokens,
            "target_first_token": target_first_token,
        }

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Args:
        context: Serve's ``AutoscalingContext``, with the metrics that :meth:`ReplicaServer.use` names.
        """
        uses = _uses(context.aggregated_metrics or {})
        return wanted_replicas(context.target_num_replicas, uses, **self._targets), {}


def _uses(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaUse]:
    """Metric -> replica -> value, turned round. A replica that has reported has reported all."""
    columns = [metrics.get(name, {}) for name in ("queued_tokens", "running_share", "first_token")]
    return [ReplicaUse(*(column.get(replica, 0.0) for column in columns)) for replica in columns[0]]
