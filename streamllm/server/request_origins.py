"""Which HTTP request each of the engine's requests answers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from streamllm.server.request_context import RequestContext

MAX_ORIGINS = 10_000
"""Requests of the engine that are remembered, live ones among them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one of the engine's requests comes from.

    Attributes:
        request_id: the HTTP request's (``X-Request-Id``).
        response_id: id of the answer: ``chatcmpl-...``, ``resp_...``.
        path: of the URL.
        trace_headers: W3C trace context of the client, if it sent one.
    """

    request_id: str
    response_id: str
    path: str
    trace_headers: dict[str, str] = field(default_factory=dict)


class RequestOrigins:
    """The origins of the latest requests, by the engine's names of them and by the clients'.

    Args:
        size: requests remembered.
    """

    def __init__(self, size: int = MAX_ORIGINS) -> None:
        self._size = size
        self._origins: OrderedDict[str, Origin] = OrderedDict()
        self._named: dict[str, dict[str, None]] = {}

    def note(self, context: RequestContext) -> None:
        """An HTTP request is answered by ``context.streams``."""
        for stream in context.streams:
            response_id = stream.request_id.rpartition("-")[0]
            origin = Origin(context.request_id, response_id, context.path, context.trace_headers)
            self._origins[stream.request_id] = origin
            for name in (origin.request_id, origin.response_id):
                self._named.setdefault(name, {})[stream.request_id] = None
        while len(self._origins) > self._size:
            self._forget_oldest()

    def of(self, engine_request_id: str) -> Origin | None:
        """Where a request of the engine comes from, if that is still known."""
        return self._origins.get(engine_request_id)

    def engine_ids(self, name: str) -> list[str]:
        """The engine's requests behind an answer's id, an ``X-Request-Id`` or an id of the engine's own."""
        return list(self._named.get(name, {name: None}))

    def _forget_oldest(self) -> None:
        engine_request_id, origin = self._origins.popitem(last=False)
        for name in {origin.request_id, origin.response_id}:
            named = self._named[name]
            named.pop(engine_request_id, None)
            if not named:
                del self._named[name]
