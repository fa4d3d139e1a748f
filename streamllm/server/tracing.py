"""OpenTelemetry traces: a span a request with its time in the queue, its prefill and its decode below it.

Attributes are those of OpenTelemetry's semantic conventions for generative AI, and vLLM's
``gen_ai.latency.*`` (seconds). Spans are made when a request has ended, and sent by a thread of the SDK's.
Nothing of OpenTelemetry's is imported unless ``--otlp-traces-endpoint`` is given.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import streamllm
from streamllm.errors import ConfigError
from streamllm.server.request_origins import Origin, RequestOrigins

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

    from streamllm.engine.events import Event
    from streamllm.engine.request_history import RequestHistory
    from streamllm.engine.stats import RequestRecord

TRACES_PATH = "/v1/traces"
"""Where collectors take traces over HTTP; for an endpoint without a path."""

CHAT_PATHS = ("/v1/chat/", "/v1/responses", "/v1/messages")

FLUSH_SECONDS = 2.0
"""How long the end of the server waits for a collector."""

Attributes = dict[str, Any]

STAGES = (("queue", "queue_seconds"), ("prefill", "prefill_seconds"), ("decode", "decode_seconds"))
"""Names of the child spans and how long each took, as :class:`RequestRecord` has it."""


def otlp_exporter(endpoint: str) -> SpanExporter:
    """The exporter for ``--otlp-traces-endpoint``.

    Raises:
        ConfigError: it is no URL, asks for gRPC, or the extra is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL such as http://localhost:4318, got {endpoint!r}."
        )
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in names if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise ConfigError(
            f"traces are sent as http/protobuf only; unset ${names[0]} and ${names[1]} ({protocol}) and name "
            "the collector's HTTP port, usually 4318."
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'streamllm[otel]' "
            f"({error.name} cannot be imported)."
        ) from None
    if parts.path in ("", "/"):
        endpoint = parts._replace(path=TRACES_PATH).geturl()
    return OTLPSpanExporter(endpoint=endpoint)


class RequestTracer:
    """
    Args:
        exporter: takes the spans.
        model_name: what requests call the model.
        origins: knows the clients' trace contexts.
        history: knows what happened to requests.
    """

    def __init__(
        self, exporter: SpanExporter, model_name: str, origins: RequestOrigins, history: RequestHistory
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {"service.version": streamllm.__version__}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = "streamllm"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("streamllm", streamllm.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = exporter
        self._model_name = model_name
        self._origins = origins
        self._history = history

    def request(self, record: RequestRecord) -> None:
        """A request has ended: make its spans."""
        from opentelemetry import trace

        clock = _WallClock()
        origin = self._origins.of(record.request_id)
        model = record.adapter or self._model_name
        operation = _operation(record, origin)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=None if origin is None else self._propagator.extract(origin.trace_headers),
            kind=trace.SpanKind.SERVER,
            start_time=clock.nanoseconds(record.arrival_time),
            attributes=_attributes(record, origin, operation, model),
        )
        if record.finish_reason == "error":
            span.set_attribute("error.type", "error")
            span.set_status(trace.StatusCode.ERROR)
        for event in self._history.events(record.request_id):
            if event.kind == "preempted":
                lost = {"streamllm.lost_tokens": event.num_tokens}
                span.add_event("preempted", lost, clock.nanoseconds(event.time))
        self._stages(record, trace.set_span_in_context(span), clock)
        span.end(clock.nanoseconds(record.finished_time))

    def close(self) -> None:
        """Send what has not been sent, unless that takes too long (blocking)."""
        # The exporter would go on trying for a minute; its own end stops that.
        give_up = threading.Timer(FLUSH_SECONDS, self._exporter.shutdown)
        give_up.start()
        try:
            self._provider.shutdown()
        finally:
            give_up.cancel()

    def _stages(self, record: RequestRecord, parent: Context, clock: _WallClock) -> None:
        starts = (record.queued_time, record.last_scheduled_time, record.first_token_time)
        events = self._history.events(record.request_id)
        for (name, attribute), start in zip(STAGES, starts, strict=True):
            seconds = getattr(record, attribute)
            if start is None:
                continue
            # A stage that was not passed has gone on to the end.
            end = record.finished_time if seconds is None else start + seconds
            span = self._tracer.start_span(
                name,
                context=parent,
                start_time=clock.nanoseconds(start),
                attributes=_waits(events) if name == "queue" else None,
            )
            span.end(clock.nanoseconds(end))


class _WallClock:
    """Unix time of times of ``time.monotonic()`` that are not long ago."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def nanoseconds(self, monotonic: float) -> int:
        return int((monotonic + self._ahead) * 1e9)


def _operation(record: RequestRecord, origin: Origin | None) -> str:
    if record.kind == "embed":
        return "embeddings"
    is_chat = origin is not None and origin.path.startswith(CHAT_PATHS)
    return "chat" if is_chat else "text_completion"


def _attributes(record: RequestRecord, origin: Origin | None, operation: str, model: str) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "streamllm",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.request.choice.count": record.num_choices,
        "gen_ai.request.id": record.request_id,
        "gen_ai.latency.e2e": record.finished_time - record.arrival_time,
        "streamllm.preemptions": record.num_preemptions,
    }
    if origin is not None:
        attributes["gen_ai.response.id"] = origin.response_id
        attributes["http.request.header.x-request-id"] = [origin.request_id]
        attributes["url.path"] = origin.path
    for name, seconds in (
        ("time_to_first_token", record.time_to_first_token),
        ("time_in_queue", record.queue_seconds),
        ("time_in_model_prefill", record.prefill_seconds),
        ("time_in_model_decode", record.decode_seconds),
        ("time_in_model_inference", record.inference_seconds),
    ):
        if seconds is not None:
            attributes[f"gen_ai.latency.{name}"] = seconds
    return attributes | _sampling(record)


def _sampling(record: RequestRecord) -> Attributes:
    params = record.params
    if params is None:
        return {}
    values = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "seed": params.seed,
    }
    return {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}


def _waits(events: list[Event]) -> Attributes:
    """What the request waited for before it was scheduled for the first time."""
    waited = next((event.waited for event in events if event.waited is not None), None) or {}
    return {f"streamllm.waited.{reason}": seconds for reason, seconds in waited.items()}
