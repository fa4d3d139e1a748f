"""Prometheus metrics: vLLM's names, labels and buckets under the prefix ``streamllm:``, and some of our own.

Gauges and counters are read from the engine at each scrape, so that they are never stale. Histograms are fed
once a step with all of its tokens, and once a request at its end: no token costs anything.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from streamllm.engine.step_history import PHASES
from streamllm.errors import ConfigError
from streamllm.server.histogram import Histogram, one_two_five
from streamllm.server.http_metrics import HttpMetrics

if TYPE_CHECKING:
    from streamllm.engine.async_engine import AsyncEngine
    from streamllm.engine.block_lives import BlockLife
    from streamllm.engine.stats import EngineStats, RequestRecord
    from streamllm.engine.step_history import Delivery, StepRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
BLOCK_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
    600.0, 1200.0, 1800.0,
)  # fmt: skip
PHASE_SECONDS = (
    0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0,
)  # fmt: skip

TIMES = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a sequence.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Of a request's tokens after the first.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("In the queue, until scheduled the last time.", REQUEST_SECONDS),
    "request_inference_time_seconds": ("From then to the last token.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From then to the first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_SECONDS),
}
"""Histograms of seconds: name -> (help, buckets)."""

TOKENS = {
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens generated for a request, all choices together.",
    "request_max_num_generation_tokens": "Tokens of a request's longest choice.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_prefill_kv_computed_tokens": "Tokens of a request's prompt that the prefix cache did not have.",
}
"""Histograms of tokens a request, up to the longest sequence: name -> help."""

BLOCKS = {
    "kv_block_lifetime_seconds": "From a KV block's allocation until its memory is handed out again.",
    "kv_block_idle_before_evict_seconds": "From a KV block's last access until then.",
    "kv_block_reuse_gap_seconds": "Between two accesses of a KV block, by prefix cache hits or by choices.",
}
"""Histograms of the sample of blocks that ``--kv-cache-metrics`` follows: name -> help."""


class Histograms:
    """Everything that is observed as it happens.

    Args:
        max_model_len: longest sequence in tokens.
        with_blocks: whether KV blocks are followed.
    """

    def __init__(self, max_model_len: int, *, with_blocks: bool) -> None:
        up_to_longest = one_two_five(max_model_len)
        self._all = {name: (text, Histogram(bounds)) for name, (text, bounds) in TIMES.items()}
        self._all |= {name: (text, Histogram(up_to_longest)) for name, text in TOKENS.items()}
        self._all["request_params_n"] = ("Choices of a request.", Histogram(CHOICES))
        self._all["iteration_tokens_total"] = ("Tokens that a step computes.", Histogram(STEP_TOKENS))
        if with_blocks:
            self._all |= {name: (text, Histogram(BLOCK_SECONDS)) for name, text in BLOCKS.items()}
        self._phases = tuple(Histogram(PHASE_SECONDS) for _ in PHASES)
        self._observe_phases = tuple(histogram.observe for histogram in self._phases)
        self._step_tokens = self._all["iteration_tokens_total"][1]
        self._first_token = self._all["time_to_first_token_seconds"][1]
        self._between_tokens = self._all["inter_token_latency_seconds"][1]

    def step(self, record: StepRecord, delivery: Delivery) -> None:
        """A step is done with."""
        self._step_tokens.observe(record.num_tokens)
        for last, count in delivery.gaps.items():
            self._between_tokens.observe(delivery.time - last, count)
        for seconds in delivery.first_tokens:
            self._first_token.observe(seconds)
        for observe, (start, end) in zip(self._observe_phases, record.phases, strict=True):
            observe(end - start)

    def request(self, record: RequestRecord) -> None:
        """A request has ended. Stages that it did not reach are not counted as zero."""
        params = record.params
        values = {
            "request_time_per_output_token_seconds": record.seconds_per_token,
            "e2e_request_latency_seconds": record.finished_time - record.arrival_time,
            "request_queue_time_seconds": record.queue_seconds,
            "request_inference_time_seconds": record.inference_seconds,
            "request_prefill_time_seconds": record.prefill_seconds,
            "request_decode_time_seconds": record.decode_seconds,
            "request_prompt_tokens": record.num_prompt_tokens,
            "request_generation_tokens": record.num_generation_tokens,
            "request_max_num_generation_tokens": record.longest_choice,
            "request_params_max_tokens": None if params is None else params.max_tokens,
            "request_params_n": record.num_choices,
        }
        if record.first_scheduled_time is not None:
            values["request_prefill_kv_computed_tokens"] = record.num_prompt_tokens - record.num_cached_tokens
        for name, value in values.items():
            if value is not None:
                self._all[name][1].observe(value)

    def block(self, life: BlockLife) -> None:
        """A KV block's memory has been handed out again."""
        self._all["kv_block_lifetime_seconds"][1].observe(life.lifetime)
        self._all["kv_block_idle_before_evict_seconds"][1].observe(life.idle)
        for gap in life.reuse_gaps:
            self._all["kv_block_reuse_gap_seconds"][1].observe(gap)

    def families(self, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
        """What has been observed so far."""
        names, values = list(labels), list(labels.values())
        for name, (text, histogram) in self._all.items():
            family = HistogramMetricFamily(prefix + name, text, labels=names)
            family.add_metric(values, histogram.buckets, histogram.sum)
            yield family
        text = "Of a step on the event loop, by phase."
        family = HistogramMetricFamily(prefix + "step_time_seconds", text, labels=[*names, "phase"])
        for phase, histogram in zip(PHASES, self._phases, strict=True):
            family.add_metric([*values, phase], histogram.buckets, histogram.sum)
        yield family


class EngineCollector:
    """prometheus-client's view of the engine."""

    def __init__(self, engine: AsyncEngine, prefix: str, model_name: str) -> None:
        self._engine = engine
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        lives = engine.block_lives
        self._histograms = Histograms(engine.max_model_len, with_blocks=lives is not None)
        engine.steps.on_step(self._histograms.step)
        engine.on_request_finished(self._histograms.request)
        if lives is not None:
            lives.on_end(self._histograms.block)

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._info("cache_config_info", "The KV cache.", self._cache_config())
        if self._engine.config.enable_lora:
            yield self._info("lora_requests_info", "Adapters in use.", self._adapters(), time.time())
        yield from self._histograms.families(self._prefix, self._labels)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry then need not scrape at registration."""
        return []

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks held by live requests, 0 to 1.", stats.kv_usage),
            ("kv_cache_waste_perc", "Share of their slots that hold no token, 0 to 1.", stats.memory.waste),
            ("kv_cache_sharing_perc", "Share of blocks saved by sharing, 0 to 1.", stats.memory.sharing),
            ("model_weights_memory_bytes", "Memory that the weights take.", self._engine.weight_bytes),
        ):
            yield self._family(GaugeMetricFamily, name, text, [((), value)])
        yield self._family(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Sequences in the queue; deferred: they wait for an adapter's slot, or for their prompt, which "
            "another choice computes.",
            [
                (("capacity",), stats.num_waiting - stats.num_deferred),
                (("deferred",), stats.num_deferred),
            ],
            "reason",
        )

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("prompt_tokens_cached", "Prompt tokens that were not computed.", stats.cached_prompt_tokens),
        ):
            yield self._family(CounterMetricFamily, name, text, [((), value)])
        computed = stats.prompt_tokens - stats.cached_prompt_tokens
        sources = [
            (("local_compute",), computed),
            (("local_cache_hit",), stats.cached_prompt_tokens),
            (("external_kv_transfer",), 0),
        ]
        text = "Prompt tokens by where their keys and values came from."
        yield self._family(CounterMetricFamily, "prompt_tokens_by_source", text, sources, "source")
        reasons = [((reason,), count) for reason, count in stats.finished.items()]
        text = "Requests that ended, by reason."
        yield self._family(CounterMetricFamily, "request_success", text, reasons, "finished_reason")

    def _family(
        self,
        kind: type[Metric],
        name: str,
        text: str,
        samples: Iterable[tuple[tuple[str, ...], float]],
        *labels: str,
    ) -> Metric:
        family: Any = kind(self._prefix + name, text, labels=[*self._labels, *labels])  # type: ignore[call-arg]
        for values, value in samples:
            family.add_metric([*self._labels.values(), *values], value)
        return family

    def _info(self, name: str, text: str, labels: dict[str, str], value: float = 1.0) -> Metric:
        """A gauge whose labels are what it says."""
        return self._family(GaugeMetricFamily, name, text, [(tuple(labels.values()), value)], *labels)

    def _cache_config(self) -> dict[str, str]:
        config = self._engine.config
        return {
            "block_size": str(config.block_size),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
            "num_gpu_blocks": str(self._engine.stats().num_blocks),
            "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
            "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        }

    def _adapters(self) -> dict[str, str]:
        """Adapters that run and wait; only the present ones make a series."""
        names: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        for request in self._engine.live_requests():
            if request.adapter is not None:
                names[request.state in ("queued", "preempted")][request.adapter] += 1
        return {
            "max_lora": str(self._engine.config.max_loras),
            "waiting_lora_adapters": ",".join(sorted(names[True])),
            "running_lora_adapters": ",".join(sorted(names[False])),
        }


def full_prefix(prefix: str) -> str:
    """What metrics' names begin with: ``prefix`` and a colon, unless it ends with one or with ``_``.

    Raises:
        ConfigError: no metric can be called so.
    """
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*:?", prefix):
        raise ConfigError(
            f"--metrics-prefix must be letters, digits and _, not beginning with a digit, got {prefix!r}."
        )
    return prefix if prefix.endswith((":", "_")) else f"{prefix}:"


class Metrics:
    """One app's metrics, in a registry of its own.

    Args:
        prefix: of the names, as :func:`full_prefix` takes it.
        http: what was measured around the engine.

    Raises:
        ConfigError: no metric can be called so.
    """

    def __init__(self, engine: AsyncEngine, model_name: str, prefix: str, http: HttpMetrics) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, full_prefix(prefix), model_name))
        self._registry.register(http)
        ProcessCollector(registry=self._registry)

    async def render(self) -> bytes:
        """The exposition in Prometheus' text format: read at one time, written in a thread."""
        read = _Read(list(self._registry.collect()))
        return await asyncio.to_thread(generate_latest, read)  # type: ignore[arg-type]


class _Read:
    """What a registry has collected, in place of the registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
