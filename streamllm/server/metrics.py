"""Prometheus metrics under vLLM's names with the prefix ``streamllm:``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.stats import RequestRecord

PREFIX = "streamllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
REQUEST_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


class EngineCollector:
    """Reads gauges and counters from the engine at each scrape, so that they are never stale."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks held by live requests, 0 to 1.", stats.kv_usage),
            ("kv_cache_waste_perc", "Share of their slots that hold no token, 0 to 1.", stats.memory.waste),
            ("kv_cache_sharing_perc", "Share of blocks saved by sharing, 0 to 1.", stats.memory.sharing),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("prompt_tokens_cached", "Prompt tokens that were not computed.", stats.prefix_cache_hits),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in stats.finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry then need not scrape at registration."""
        return []


class Metrics:
    """One app's metrics, in a registry of its own."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name))
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            TIME_TO_FIRST_TOKEN_BUCKETS,
            model_name,
        )
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", REQUEST_LATENCY_BUCKETS, model_name
        )
        engine.on_request_finished(self._observe)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], model_name: str) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(model_name)

    def _observe(self, record: RequestRecord) -> None:
        if record.first_token_time is not None:
            self._time_to_first_token.observe(record.first_token_time - record.arrival_time)
        self._latency.observe(record.finished_time - record.arrival_time)

    def render(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)
