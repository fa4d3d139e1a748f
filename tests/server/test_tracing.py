"""OpenTelemetry: the spans of a request, where they are sent, and what happens without the extra."""

from __future__ import annotations

import builtins
import itertools
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from serving import run_server

from streamllm.errors import ConfigError
from streamllm.server.tracing import otlp_exporter

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture
def exporter(monkeypatch):
    """The SDK's in-memory exporter in place of the one that sends."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr("streamllm.server.app.otlp_exporter", lambda endpoint: exporter)
    return exporter


def run_traced(**settings):
    return run_server(otlp_traces_endpoint="http://localhost:4318", **settings)


def test_spans_of_a_request(exporter):
    with run_traced(step_seconds=0.002) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "top_p": 0.5}
        headers = {**PARENT, "x-request-id": "mine"}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers).json()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {"chat fake-model", "queue", "prefill", "decode"}
    request = spans["chat fake-model"]
    assert f"{request.context.trace_id:032x}" == TRACE_ID and f"{request.parent.span_id:016x}" == SPAN_ID
    attributes = dict(request.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "fake-model"
    assert attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.top_p"]) == (5, 0.5)
    assert 0 < attributes["gen_ai.latency.time_to_first_token"] < attributes["gen_ai.latency.e2e"]
    assert spans["queue"].attributes["streamllm.waited.next_step"] >= 0
    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {stage.parent.span_id for stage in stages} == {request.context.span_id}
    times = [(stage.start_time, stage.end_time) for stage in stages]
    assert request.start_time <= times[0][0] and times[-1][1] <= request.end_time
    for (start, end), (following, _) in itertools.pairwise(times):
        assert start <= end and abs(following - end) < 1000  # nanoseconds, made from floats
    assert request.resource.attributes["service.name"] == "streamllm"


def test_other_endings(exporter):
    with run_traced(step_seconds=0.002) as server:
        server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2})
        server.post("/v1/embeddings", {"input": "a"})
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 3000, "stream": True}
        ) as response:
            next(response.iter_raw())
        server.wait_idle()
        server.executor.fail_next.append(RuntimeError("broken"))
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 500
        headers = {"traceparent": "00-zz-1-01"}
        httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    requests = [
        span for span in exporter.get_finished_spans() if span.name not in ("queue", "prefill", "decode")
    ]
    assert [span.name for span in requests].count("text_completion fake-model") == 5
    assert [span.name for span in requests].count("embeddings fake-model") == 1
    reasons = sorted(span.attributes["gen_ai.response.finish_reasons"][0] for span in requests)
    assert reasons == ["abort", "error", "length", "length", "length", "stop"]
    (failed,) = [span for span in requests if not span.status.is_ok and span.attributes.get("error.type")]
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert all(span.parent is None for span in requests)  # a trace context that is none begins no trace


def test_spans_reach_a_collector():
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["content-type"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{collector.server_port}"
        with run_server(otlp_traces_endpoint=url) as server:
            server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    finally:
        collector.shutdown()
        collector.server_close()
    (path, kind, body), *_ = received
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    message = trace_service.ExportTraceServiceRequest.FromString(body)
    names = [
        span.name
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(names) == ["decode", "prefill", "queue", "text_completion fake-model"]


def test_a_collector_that_does_not_answer_harms_nobody():
    pytest.importorskip("opentelemetry.sdk")
    with run_server(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        server.canary()
        began = time.monotonic()
    assert time.monotonic() - began < 5  # it is not waited for long


@pytest.mark.parametrize("endpoint", ["localhost:4317", "", "ftp://host/", "http://", "grpc://host:4317"])
def test_an_endpoint_that_is_no_url(endpoint):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be a URL"):
        otlp_exporter(endpoint)


def test_grpc_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="http/protobuf only"):
        otlp_exporter("http://localhost:4317")


def test_a_missing_extra_is_one_clear_error(monkeypatch):
    real_import = builtins.__import__

    def without_opentelemetry(name, *args, **kwargs):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_opentelemetry)
    with pytest.raises(ConfigError, match=r"pip install 'streamllm\[otel\]'"):
        otlp_exporter("http://localhost:4318")


def test_nothing_is_imported_without_the_flag():
    code = (
        "import streamllm.server.app, sys; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
