from __future__ import annotations

import random

from streamllm.deploy.prefix_traffic import SMALLEST_WINDOW, WINDOW, HotPrefix, PrefixTraffic

REPLICAS = 40


def counted(share, num_requests, seed=0):
    """The last word on a prefix of two hashes with this share of the requests, the others all different."""
    traffic, rng = PrefixTraffic(), random.Random(seed)
    last = None
    for number in range(num_requests):
        if rng.random() < share:
            last = traffic.count([1, 2, 10**6 + number], REPLICAS)
        else:
            assert traffic.count([10**9 + number, 2 * 10**9 + number], REPLICAS) == HotPrefix(0, 1)
    return traffic, last


def test_a_hot_prefix_gets_the_replicas_that_it_needs():
    # 30 % of the requests of 40 replicas: 12 replicas' whole capacity, three times that with headroom.
    assert counted(0.30, 20_000)[1] == HotPrefix(2, 64)
    assert counted(0.09, 20_000)[1] == HotPrefix(2, 16)


def test_a_cold_one_gets_one():
    assert counted(0.5 / 3 / REPLICAS, 20_000)[1] == HotPrefix(0, 1)


def test_the_first_requests_make_nothing_hot():
    traffic = PrefixTraffic()
    assert all(traffic.count([1], 2) == HotPrefix(0, 1) for _ in range(40))
    assert any(traffic.count([1], 2).length == 1 for _ in range(40))


def test_what_is_no_longer_asked_for_cools_down_and_memory_is_bounded():
    traffic, _ = counted(0.3, 20_000)
    window = max(SMALLEST_WINDOW, WINDOW * REPLICAS)
    for number in range(3 * window):
        traffic.count([10**12 + number, 5], REPLICAS)
        assert len(traffic._young) <= 2 * window
    assert traffic.count([1, 2, 3], REPLICAS) == HotPrefix(0, 1)
