"""Metrics of several replicas in one text."""

from __future__ import annotations

import functools

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streamllm.deploy.replica_metrics import labelled, summed


@functools.cache
def text(seed: int) -> str:
    registry = CollectorRegistry()
    counter = Counter("tokens", "Tokens.", ["model"], registry=registry)
    counter.labels('a "b"\\c').inc(seed)
    Gauge("cache_perc", "Used.", registry=registry).set(seed / 10)
    Gauge("requests", "Running.", registry=registry).set(seed)
    Gauge("process_start_time_seconds", "Start.", registry=registry).set(1000 + seed)
    histogram = Histogram("wait_seconds", "Wait.", buckets=(1.0, 2.0), registry=registry)
    histogram.observe(seed)
    return generate_latest(registry).decode()


def samples(metrics: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }


def test_every_sample_says_whose_it_is() -> None:
    merged = labelled({"r1": text(1), "r2": text(2)})
    found = samples(merged)
    for replica, seed in (("r1", 1), ("r2", 2)):
        for (name, labels), value in samples(text(seed)).items():
            assert found[name, tuple(sorted((*labels, ("replica", replica))))] == value
    assert len(found) == len(samples(text(1))) * 2
    names = [line.split()[2] for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_together_they_are_as_one_server() -> None:
    found = samples(summed({"r1": text(1), "r2": text(2)}))
    assert found["tokens_total", (("model", 'a "b"\\c'),)] == 3
    assert found["requests", ()] == 3
    assert found["cache_perc", ()] == 0.15000000000000002
    assert found["process_start_time_seconds", ()] == 1001
    assert found["wait_seconds_bucket", (("le", "1.0"),)] == 1
    assert found["wait_seconds_bucket", (("le", "2.0"),)] == 2
    assert found["wait_seconds_count", ()] == 2
    assert found["wait_seconds_sum", ()] == 3
    assert found.keys() == samples(text(1)).keys()


def test_no_replica_no_text() -> None:
    assert labelled({}) == summed({}) == ""
