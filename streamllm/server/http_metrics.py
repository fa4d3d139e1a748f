"""HTTP metrics under the names that prometheus-fastapi-instrumentator gives them in vLLM's server.

Labels are bounded whatever clients send: the template of a route (``none`` for a path that is none), a known
method, the first digit of the status.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamllm.server.histogram import Histogram
from streamllm.server.request_context import current_request

SECONDS = (0.1, 0.5, 1.0)
FINE_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0,
    30.0, 60.0,
)  # fmt: skip

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

NO_ROUTE = "none"


class HttpMetrics:
    """Counts requests by route; as a collector gives them to a registry.

    Args:
        routes: the application's.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._templates: dict[str, str] = {}
        self._of_endpoint: dict[Any, str] = {}
        for route in routes:
            if not isinstance(route, Route):
                continue
            if "{" in route.path:
                self._of_endpoint[route.endpoint] = route.path.replace(":path}", "}")
            else:
                self._templates[route.path] = route.path
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._fine_seconds = Histogram(FINE_SECONDS)
        self._request_bytes: dict[str, list[int]] = {}
        self._response_bytes: dict[str, list[int]] = {}

    def note(self, scope: Scope, status: int, seconds: float, num_bytes: int) -> None:
        """An answer has gone out, or as much of it as ever will.

        Args:
            scope: as the router has left it.
            status: 0 if nothing was sent.
            num_bytes: of the answer's body.
        """
        handler = self._handler(scope)
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        self._requests[handler, method, f"{status // 100}xx" if status else NO_ROUTE] += 1
        if (handler, method) not in self._seconds:
            self._seconds[handler, method] = Histogram(SECONDS)
        self._seconds[handler, method].observe(seconds)
        self._fine_seconds.observe(seconds)
        for sizes, size in ((self._request_bytes, _length(scope)), (self._response_bytes, num_bytes)):
            total = sizes.setdefault(handler, [0, 0])
            total[0] += 1
            total[1] += size

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests.", labels=["handler", "method", "status"]
        )
        for key, count in self._requests.items():
            requests.add_metric(key, count)
        yield requests
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Of HTTP requests by route.", labels=["handler", "method"]
        )
        for route, histogram in self._seconds.items():
            seconds.add_metric(route, histogram.buckets, histogram.sum)
        yield seconds
        fine = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "Of all HTTP requests.", labels=[]
        )
        fine.add_metric([], self._fine_seconds.buckets, self._fine_seconds.sum)
        yield fine
        for name, text, sizes in (
            ("http_request_size_bytes", "Bodies of HTTP requests.", self._request_bytes),
            ("http_response_size_bytes", "Bodies of HTTP answers.", self._response_bytes),
        ):
            summary = SummaryMetricFamily(name, text, labels=["handler"])
            for handler, (count, total) in sizes.items():
                summary.add_metric([handler], count, total)
            yield summary

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry then need not scrape at registration."""
        return []

    def _handler(self, scope: Scope) -> str:
        endpoint: Any = scope.get("endpoint")
        if endpoint is None:
            return NO_ROUTE
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return self._templates.get(path) or self._of_endpoint.get(endpoint, NO_ROUTE)


def _length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0


class HttpMeter:
    """Middleware that feeds :class:`HttpMetrics`."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = num_bytes = 0
        began = time.monotonic()

        async def metered_send(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, metered_send)
        finally:
            num_bytes += current_request().num_bytes_past_middleware
            self._metrics.note(scope, status, time.monotonic() - began, num_bytes)
