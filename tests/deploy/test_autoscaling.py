"""How many replicas a load needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from streamllm.deploy.autoscaling import QueuePolicy, ReplicaUse, wanted_replicas

IDLE = ReplicaUse(0, 0.0, 0.0)
BUSY = ReplicaUse(0, 1.0, 1.5)


def wanted(num_replicas: int, *uses: ReplicaUse) -> int:
    return wanted_replicas(num_replicas, uses, target_queued_tokens=1000, target_first_token=2.0)


@pytest.mark.parametrize(
    ("num_replicas", "uses", "expected"),
    [
        pytest.param(2, [], 2, id="no report"),
        pytest.param(2, [IDLE, IDLE], 1, id="idle"),
        pytest.param(1, [IDLE], 1, id="the last one"),
        pytest.param(2, [BUSY, BUSY], 2, id="busy, nobody waits"),
        pytest.param(
            2, [ReplicaUse(1500, 1.0, 0), ReplicaUse(1500, 1.0, 0)], 3, id="half as much again waits"
        ),
        pytest.param(2, [ReplicaUse(9000, 1.0, 0), ReplicaUse(0, 1.0, 0)], 4, id="at most twice as many"),
        pytest.param(2, [ReplicaUse(1500, 1.0, 0), IDLE], 2, id="one queue that the other could take"),
        pytest.param(2, [ReplicaUse(0, 1.0, 3.0), ReplicaUse(0, 1.0, 3.0)], 3, id="first tokens come late"),
        pytest.param(4, [ReplicaUse(0, 1.0, 8.0)] * 2, 4, id="late, and more are starting"),
        pytest.param(3, [ReplicaUse(0, 0.3, 0.5)] * 3, 2, id="two can carry it"),
        pytest.param(3, [ReplicaUse(0, 0.5, 0.5)] * 3, 3, id="two would be full"),
        pytest.param(3, [ReplicaUse(0, 0.1, 1.5)] * 3, 3, id="hardly in time"),
    ],
)
def test_wanted_replicas(num_replicas: int, uses: list[ReplicaUse], expected: int) -> None:
    assert wanted(num_replicas, *uses) == expected


def test_the_policy_reads_what_serve_has_gathered() -> None:
    metrics = {
        "queued_tokens": {"a": 3000.0, "b": 0.0},
        "running_share": {"a": 1.0, "b": 0.1},
        "first_token": {"a": 0.4, "b": 0.2},
    }
    policy = QueuePolicy(target_queued_tokens=1000, target_first_token=2.0)
    assert policy(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)) == (3, {})
    assert policy(SimpleNamespace(aggregated_metrics=None, target_num_replicas=2)) == (2, {})
