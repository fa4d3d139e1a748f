"""What of a cluster one replica takes."""

from __future__ import annotations

import pytest

from streamllm.deploy.replica_share import ReplicaShare, replica_share
from streamllm.errors import ConfigError


@pytest.mark.parametrize(
    ("engine", "resources", "replicas", "most", "expected"),
    [
        ({}, {"CPU": 8.0}, 2, 2, ReplicaShare(4, 0, 4)),
        ({}, {"CPU": 8.0}, 2, 8, ReplicaShare(1, 0, 1)),
        ({}, {"CPU": 4.0}, 2, 100, ReplicaShare(1, 0, 1)),
        ({"threads": 3}, {"CPU": 8.0}, 2, 2, ReplicaShare(3, 0, 3)),
        ({"tensor_parallel_size": 2}, {"CPU": 8.0}, 2, 2, ReplicaShare(4, 0, 2)),
        ({}, {"CPU": 8.0, "GPU": 4.0}, 2, 4, ReplicaShare(0, 1, None)),
        ({"tensor_parallel_size": 2}, {"CPU": 8.0, "GPU": 4.0}, 2, 4, ReplicaShare(0, 2, None)),
        ({"backend": "cpu"}, {"CPU": 8.0, "GPU": 4.0}, 2, 2, ReplicaShare(4, 0, 4)),
        (
            {"tensor_parallel_size": 4, "distributed_executor_backend": "ray"},
            {"CPU": 2.0, "GPU": 8.0}, 2, 2, ReplicaShare(0, 0, None),
        ),
    ],
)  # fmt: skip
def test_share(engine: dict, resources: dict, replicas: int, most: int, expected: ReplicaShare) -> None:
    assert replica_share(engine, resources, replicas=replicas, most_replicas=most) == expected


@pytest.mark.parametrize(
    ("engine", "resources", "said"),
    [
        ({}, {"CPU": 2.0}, "--replicas 3 needs 3 cores, and the cluster has 2"),
        ({"threads": 2}, {"CPU": 4.0}, "needs 3 of 2 cores, and the cluster has 4; .* or fewer --threads"),
        ({"backend": "cuda"}, {"CPU": 9.0}, "--replicas 3 needs 3 GPUs, and the cluster has 0"),
    ],
)
def test_too_little_is_said(engine: dict, resources: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replica_share(engine, resources, replicas=3, most_replicas=3)
