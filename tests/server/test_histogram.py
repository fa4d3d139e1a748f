"""Our histogram against prometheus-client's."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily

from streamllm.server import histogram


def test_it_says_what_prometheus_client_says():
    bounds = (0.01, 0.5, 1, 10)
    theirs, ours = CollectorRegistry(), histogram.Histogram(bounds)
    reference = Histogram("seconds", "Of something.", registry=theirs, buckets=bounds)
    for _ in range(300):
        value, count = random.choice([0.0, 0.01, 0.5, 1, 10, random.uniform(0, 12)]), random.randint(0, 3)
        ours.observe(value, count)
        for _ in range(count):
            reference.observe(value)

    class Collector:
        def collect(self):
            family = HistogramMetricFamily("seconds", "Of something.")
            family.add_metric([], ours.buckets, ours.sum)
            return [family]

    def samples(text):
        lines = [line.rpartition(" ") for line in text.decode().splitlines() if "created" not in line]
        return {name: float(value) for name, _, value in lines if not name.startswith("#")}

    assert samples(generate_latest(Collector())) == pytest.approx(samples(generate_latest(theirs)))


@pytest.mark.parametrize(
    "largest, bounds", [(1, [1]), (4, [1, 2]), (100, [1, 2, 5, 10, 20, 50, 100]), (4096, [1, 2, 5])]
)
def test_bounds_of_tokens(largest, bounds):
    made = histogram.one_two_five(largest)
    assert made[: len(bounds)] == bounds and made[-1] <= largest < 2.5 * made[-1]
