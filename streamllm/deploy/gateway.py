"""The ASGI application in front of the replicas: chooses one for each request and passes its answer on.

A replica that dies takes its connections with it. What it has not begun to answer is asked again of another
one, once; what it has begun ends with an event that says so. The gateway keeps nothing of a request but its
body.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import quote

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from streamllm.config import ServerConfig
from streamllm.deploy.cluster_routes import ClusterRoutes, Counters
from streamllm.deploy.prompt_prefix import prefix_hashes
from streamllm.deploy.replicas import Replica, Replicas, RoutingRequest
from streamllm.deploy.stream_relay import EventRelay, farewell, previous_response
from streamllm.errors import EngineDeadError, InvalidRequestError
from streamllm.http_transport import LeanTransport
from streamllm.server.app import open_paths
from streamllm.server.body import read_body
from streamllm.server.errors import error_response, failure_response
from streamllm.server.in_flight import InFlight
from streamllm.server.middleware import ADMIN_PATHS, CORS, ApiKeys, RequestIds, UnexpectedErrors
from streamllm.server.request_context import current_request

logger = logging.getLogger("streamllm.deploy")

REPLICA_WAIT = 60.0
"""Seconds that a request waits for a replica that it may go to: as long as one takes to be built again."""

SUSPECT_SECONDS = 10.0
"""For which a replica that has broken a connection is left alone, unless there is no other."""

CONNECT_SECONDS = 5.0
MOST_HELD_BYTES = 1 << 20
"""Of an answer that is no stream: up to this it is passed on whole or not at all."""

BYTES_PER_TOKEN = 4
"""Of a request's body, roughly."""

USUAL_OUTPUT_TOKENS = 256
MOST_OUTPUT_TOKENS = 1024
"""That a request counts for: without a limit of its own, and with a higher one, which few answers reach."""

_MAX_TOKENS = re.compile(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,9})')

GENERATING_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings",
     "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize",
     "/v1/chat/completions/render", "/v1/completions/render"}
)  # fmt: skip
"""Requests (POST) that any replica can answer."""

_URL_CHARACTERS = "".join(map(chr, range(0x21, 0x7F)))
"""Those that pass as they are: what is printable."""

_NOT_PASSED_ON = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
     b"upgrade", b"transfer-encoding", b"x-request-id", b"request-id", b"date", b"server", b"vary"}
)  # fmt: skip
"""Headers that belong to one connection (RFC 9110, 7.6.1), or that either side sets by itself."""

_NOT_SENT = _NOT_PASSED_ON | {b"host", b"origin", b"expect", b"content-length", b"x-forwarded-for"}


def gateway_app(replicas: Replicas, config: ServerConfig) -> ASGIApp:
    """The gateway with the middleware that must come before a replica is chosen: ids, CORS and keys."""
    app: ASGIApp = Gateway(replicas, config)
    keys, admin_keys = config.api_key, config.admin_api_key
    app = ApiKeys(app, keys, admin_keys, open_paths(config))
    app = UnexpectedErrors(app)
    app = CORS(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=("x-request-id", "request-id", "retry-after"),
    )
    return RequestIds(app)


class ReplicaLostError(EngineDeadError):
    """A replica has not answered, or not to the end.

    Attributes:
        was_reached: whether it may have begun with the request.
    """

    def __init__(self, message: str, *, was_reached: bool = True) -> None:
        super().__init__(message)
        self.was_reached = was_reached


@dataclass(slots=True)
class _Incoming:
    """A request and how much of its answer has been sent.

    Attributes:
        target: path and query; host and port are each replica's.
        body: as far as it has been read; whole unless ``rest`` is there.
        rest: gives what comes after ``body``, once.
        routed: choices that were made for it, which must hear of its end.
    """

    scope: Scope
    path: str
    target: httpx.URL
    body: bytes
    rest: AsyncIterator[bytes] | None
    send: Send
    has_begun: bool = False
    routed: list[tuple[Replica, RoutingRequest]] = field(default_factory=list)

    def to(self, replica: Replica) -> httpx.Request:
        """The same request, to a replica."""
        headers = [(name, value) for name, value in self.scope["headers"] if name.lower() not in _NOT_SENT]
        headers += [
            (b"host", replica.address.encode()),
            (b"x-request-id", current_request().request_id.encode()),
        ]
        content: bytes | AsyncIterator[bytes] = self.body
        if self.rest is None:
            headers.append((b"content-length", b"%d" % len(self.body)))
        else:
            headers.append((b"transfer-encoding", b"chunked"))
            content = _joined(self.body, self.rest)
        url = self.target.copy_with(host=replica.host, port=replica.port)
        timeouts = {"connect": CONNECT_SECONDS, "read": None}
        return httpx.Request(
            self.scope["method"], url, headers=headers, content=content, extensions={"timeout": timeouts}
        )

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Once; then nothing happens."""
        if self.has_begun:
            return
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})


async def _joined(body: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield body
    async for piece in rest:
        yield piece


@dataclass(slots=True)
class _Suspects:
    """Replicas that have broken connections lately."""

    until: dict[str, float] = field(default_factory=dict)

    def add(self, replica_id: str) -> None:
        self.until[replica_id] = time.monotonic() + SUSPECT_SECONDS

    def ids(self) -> list[str]:
        if self.until:
            now = time.monotonic()
            self.until = {replica_id: until for replica_id, until in self.until.items() if until > now}
        return list(self.until)


class Gateway:
    """Passes requests on to replicas, and answers what concerns them all (:class:`ClusterRoutes`).

    Args:
        replicas: to choose from.
        config: of the server that they are together.
    """

    def __init__(self, replicas: Replicas, config: ServerConfig) -> None:
        self._replicas = replicas
        self._config = config
        self._transport = LeanTransport()
        self._suspects = _Suspects()
        self._in_flight = InFlight()
        self.counters = Counters()
        self._routes = ClusterRoutes(replicas, config, self._transport, self.counters)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in ADMIN_PATHS and not (self._config.api_key or self._config.admin_api_key):
            # Behind a proxy every client seems to be on the loopback interface.
            message = f"{path} needs a key where there are replicas: start them with --admin-api-key."
            await error_response(message, status=403)(scope, receive, send)
            return
        route = self._routes.find(scope["method"], path)
        try:
            if route is not None:
                await (await route(Request(scope, receive)))(scope, receive, send)
            else:
                await self._pass_on(scope, path, receive, send)
        except ClientDisconnect:
            logger.debug("a client left before the end of its answer")

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start when there is a replica; close connections at the end."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._replicas.choose(RoutingRequest())
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._transport.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _pass_on(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        try:
            target = _target(scope)
        except InvalidRequestError as error:
            await failure_response(error)(scope, receive, send)
            return
        limit = self._config.max_body_bytes
        is_generating = scope["method"] == "POST" and path in GENERATING_PATHS
        if is_generating:
            try:
                body, is_whole = await read_body(Request(scope, receive), limit), True
            except InvalidRequestError as error:
                await failure_response(error)(scope, receive, send)
                return
        else:
            body, is_whole = await _read_beginning(receive, limit)
        incoming = _Incoming(scope, path, target, body, None if is_whole else _pieces(receive), send)
        self.counters.requests += 1
        work = self._answer(incoming, is_generating)
        try:
            if is_whole:
                await self._in_flight.run(receive, work, admitted=True)
            else:
                await work  # it reads the rest of the body; a client that leaves ends that
        finally:
            for replica, request in incoming.routed:
                self._replicas.ended(replica, request)

    async def _answer(self, incoming: _Incoming, is_generating: bool) -> None:
        """Ask one replica, and if it is lost before it has said anything, another one, once."""
        tried: list[str] = []
        is_retry = False
        while True:
            try:
                replica = await self._choose(incoming, is_generating, tried)
            except asyncio.TimeoutError:
                await self._refuse(incoming, f"No replica has been there for {REPLICA_WAIT:g} s.")
                return
            try:
                await self._exchange(incoming, replica, is_last=is_retry or not is_generating)
                return
            except ReplicaLostError as error:
                self._suspects.add(replica.id)
                tried.append(replica.id)
                logger.warning("%s: %s", replica.id, error)
                if incoming.has_begun:
                    return
                may_repeat = incoming.rest is None and (is_generating or incoming.scope["method"] == "GET")
                if error.was_reached and (is_retry or not may_repeat):
                    await self._refuse(incoming, "The replica that was to answer is gone.")
                    return
                is_retry = is_retry or error.was_reached
                self.counters.retries += 1

    async def _choose(self, incoming: _Incoming, is_generating: bool, tried: list[str]) -> Replica:
        """Raises asyncio.TimeoutError: there is none to be had."""
        if not is_generating:
            found = await self._routes.replica_for(incoming.scope, incoming.path, tried)
            if found is not None:
                return found
        elif (response_id := previous_response(incoming.body)) is not None:
            found = await self._routes.holder_of(response_id, incoming.scope)
            if found is not None and found.id not in tried:
                return found
        hashes = prefix_hashes(incoming.body, incoming.path) if is_generating else []
        cost = _cost(incoming.body) if is_generating else 0.0
        exclude = {*tried, *self._suspects.ids()}
        if all(replica.id in exclude for replica in self._replicas.all()):
            exclude = set(tried)  # a suspect is better than nobody
        request = RoutingRequest(hashes, cost, tuple(exclude))
        replica = await asyncio.wait_for(self._replicas.choose(request), REPLICA_WAIT)
        incoming.routed.append((replica, request))
        return replica

    async def _refuse(self, incoming: _Incoming, message: str) -> None:
        response = error_response(message, status=503, headers={"Retry-After": "5"})
        await incoming.begin(503, response.raw_headers)
        await incoming.write(bytes(response.body), more=False)

    # -- one replica ---------------------------------------------------------------------------------------

    async def _exchange(self, incoming: _Incoming, replica: Replica, *, is_last: bool) -> None:
        """Ask a replica and pass its answer on.

        Args:
            is_last: no other replica will be asked, so that this one's "not now" is the answer.

        Raises:
            ReplicaLostError: the connection broke; of an answer that had begun, the end has been sent.
        """
        try:
            response = await self._transport.handle_async_request(incoming.to(replica))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ReplicaLostError(f"cannot be reached: {error}", was_reached=False) from None
        except httpx.TransportError as error:
            raise ReplicaLostError(f"has not answered: {error}") from None
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            if response.status_code == 503 and not is_last:
                raise ReplicaLostError("takes no requests")
            headers = [item for item in response.headers.raw if item[0].lower() not in _NOT_PASSED_ON]
            headers.append((b"x-streamllm-replica", replica.id.encode()))
            passed_on = self._relay_events if _is_stream(response) else self._relay_body
            await passed_on(incoming, response.status_code, headers, response.stream)
        finally:
            await response.stream.aclose()

    async def _relay_events(
        self,
        incoming: _Incoming,
        status: int,
        headers: list[tuple[bytes, bytes]],
        stream: httpx.AsyncByteStream,
    ) -> None:
        relay = EventRelay()
        try:
            async for data in stream:
                if ready := relay.feed(data):
                    await incoming.begin(status, headers)
                    await incoming.write(ready)
        except httpx.TransportError as error:
            if incoming.has_begun:
                self.counters.lost_streams += 1
                message = "The replica that was answering is gone; ask again."
                await incoming.write(farewell(incoming.path, message, relay.num_events))
                await incoming.write(b"", more=False)
            raise ReplicaLostError(f"has broken off its answer: {error}") from None
        await incoming.begin(status, headers)
        await incoming.write(relay.rest(), more=False)

    async def _relay_body(
        self,
        incoming: _Incoming,
        status: int,
        headers: list[tuple[bytes, bytes]],
        stream: httpx.AsyncByteStream,
    ) -> None:
        """What is small is held back until it is whole."""
        held = bytearray()
        try:
            async for data in stream:
                held += data
                if len(held) > MOST_HELD_BYTES:
                    await incoming.begin(status, headers)
                    await incoming.write(bytes(held))
                    held.clear()
        except httpx.TransportError as error:
            # An answer without its end would be taken for a whole one: the server cuts the connection.
            if incoming.has_begun:
                raise
            raise ReplicaLostError(f"has broken off its answer: {error}") from None
        await incoming.begin(status, headers)
        await incoming.write(bytes(held), more=False)


def _target(scope: Scope) -> httpx.URL:
    """Path and query as they came, bytes that no URL may hold as escapes.

    Raises:
        InvalidRequestError: they are none, or too long.
    """
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope["query_string"]
    target = quote(path + (b"?" + query if query else b""), safe=_URL_CHARACTERS)
    try:
        return httpx.URL(scheme="http", host="replica", raw_path=target.encode("ascii"))
    except httpx.InvalidURL as error:
        raise InvalidRequestError(f"The request's path is not valid: {error}.") from None


def _cost(body: bytes) -> float:
    """Tokens that a request is expected to come to, those of its answer included."""
    found = _MAX_TOKENS.search(body)
    output = min(int(found[1]), MOST_OUTPUT_TOKENS) if found else USUAL_OUTPUT_TOKENS
    return len(body) / BYTES_PER_TOKEN + output


def _is_stream(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


async def _read_beginning(receive: Receive, limit: int) -> tuple[bytes, bool]:
    """The request's body, and whether that is all of it: beyond ``limit`` bytes no more is read.

    Raises:
        ClientDisconnect: the client left in the middle of it.
    """
    body = bytearray()
    while len(body) <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body), True
    return bytes(body), False


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    """The rest of a body. Raises ClientDisconnect."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
