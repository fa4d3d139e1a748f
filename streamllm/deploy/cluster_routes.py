"""What concerns all replicas together: health, metrics, and where something is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import quote

import httpx
import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

import streamllm
from streamllm.config import ServerConfig
from streamllm.deploy.replica_metrics import labelled, summed
from streamllm.deploy.replicas import Replica, Replicas
from streamllm.server.errors import error_response
from streamllm.server.json_response import json_response
from streamllm.server.metrics import CONTENT_TYPE, full_prefix

REPLICA_SECONDS = 5.0
"""In which a replica must answer what it is asked besides requests."""

STORED_RESPONSES = "/v1/responses/"

Route = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Counters:
    """What the gateway counts since its start.

    Attributes:
        requests: passed on to replicas.
        retries: asked again of another replica.
        lost_streams: ended by the death of their replica.
    """

    requests: int = 0
    retries: int = 0
    lost_streams: int = 0


class ClusterRoutes:
    """Routes that the gateway answers itself, and the way to a replica for those that generate nothing.

    Stored responses are kept where they were made; files and batches by the replica of rank 0, as is all that
    any replica can tell. ``?replica=N`` asks the one of rank N.

    Args:
        counters: of the gateway, live.
    """

    def __init__(
        self,
        replicas: Replicas,
        config: ServerConfig,
        transport: httpx.AsyncBaseTransport,
        counters: Counters,
    ) -> None:
        self._replicas = replicas
        self._transport = transport
        self._counters = counters
        self._prefix = full_prefix(config.metrics_prefix)
        self._own: dict[tuple[str, str], Route] = {
            ("GET", "/health"): self.health,
            ("GET", "/ready"): self.health,
            ("GET", "/ping"): self.health,
            ("POST", "/ping"): self.health,
            ("GET", "/version"): self.version,
            ("GET", "/load"): self.load,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/metrics/sum"): self.metrics_sum,
            ("POST", "/reset_prefix_cache"): self.tell_all,
            ("POST", "/v1/load_lora_adapter"): self.refuse_adapters,
            ("POST", "/v1/unload_lora_adapter"): self.refuse_adapters,
        }

    def find(self, method: str, path: str) -> Route | None:
        """The route that answers a request without passing it on."""
        return self._own.get((method, path))

    # -- where things are ----------------------------------------------------------------------------------

    async def replica_for(self, scope: Scope, path: str, exclude: Sequence[str]) -> Replica | None:
        """Where to send a request that generates nothing; ``None``: anywhere."""
        replicas = [replica for replica in self._by_rank() if replica.id not in exclude]
        asked = Request(scope).query_params.get("replica")
        if asked is not None:
            replicas = [replica for replica in replicas if str(replica.rank) == asked] or replicas
        elif path.startswith(STORED_RESPONSES):
            holder = await self.holder_of(path.removeprefix(STORED_RESPONSES).partition("/")[0], scope)
            if holder is not None and holder.id not in exclude:
                return holder
        return replicas[0] if replicas else None

    async def holder_of(self, response_id: str, scope: Scope) -> Replica | None:
        """The replica that keeps a stored response, which only who has made it can see."""
        replicas = self._by_rank()
        path = STORED_RESPONSES + quote(response_id, safe="")
        answers = await self._ask_all("GET", path, Headers(scope=scope), replicas)
        found = (replica for replica, answer in zip(replicas, answers, strict=True) if _is_ok(answer))
        return next(found, None)

    def _by_rank(self) -> list[Replica]:
        return sorted(self._replicas.all(), key=lambda replica: (replica.rank, replica.id))

    # -- routes --------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """200 while there is a replica."""
        if self._replicas.all():
            return Response(status_code=200)
        return error_response("There is no replica.", status=503, headers={"Retry-After": "5"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": streamllm.__version__})

    async def load(self, request: Request) -> Response:
        """Each figure of the replicas' own ``/load``, summed up."""
        total: dict[str, float] = {}
        for text in (await self._texts("/load", request)).values():
            for name, value in orjson.loads(text).items():
                total[name] = total.get(name, 0) + value
        return json_response(total)

    async def metrics(self, request: Request) -> Response:
        """The metrics of all replicas, each labelled by its id, and the gateway's."""
        text = labelled(await self._texts("/metrics", request)) + self._own_metrics()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def metrics_sum(self, request: Request) -> Response:
        """The metrics of all replicas together, as of one server, and the gateway's."""
        text = summed(await self._texts("/metrics", request)) + self._own_metrics()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def tell_all(self, request: Request) -> Response:
        """Pass a request without a body on to every replica; the first failure is the answer."""
        answers = await self._ask_all("POST", request.url.path, request.headers, self._by_rank())
        for answer in answers:
            if not _is_ok(answer):
                return error_response("Not every replica has done it; ask again.", status=503)
        return Response(status_code=200)

    async def refuse_adapters(self, request: Request) -> Response:
        """An adapter that only the replicas of this moment know would be missing on the next."""
        return error_response(
            "Replicas share the adapters that they are started with: name them with --lora-modules.",
            status=501,
        )

    def _own_metrics(self) -> str:
        counts = {"replicas": len(self._replicas.all())}
        counts |= {f"gateway_{name}_total": value for name, value in asdict(self._counters).items()}
        counts |= {
            f"router_{name.removeprefix('num_')}_total": value
            for name, value in self._replicas.counters().items()
        }
        lines = []
        for name, value in counts.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE {self._prefix}{name} {kind}", f"{self._prefix}{name} {value}"]
        return "\n".join(lines) + "\n"

    # -- asking replicas -----------------------------------------------------------------------------------

    async def _texts(self, path: str, request: Request) -> dict[str, str]:
        """Replica's id -> what it answers; those that do not are left out."""
        replicas = self._by_rank()
        answers = await self._ask_all("GET", path, request.headers, replicas)
        return {
            replica.id: answer.text
            for replica, answer in zip(replicas, answers, strict=True)
            if answer is not None and _is_ok(answer)
        }

    async def _ask_all(
        self, method: str, path: str, headers: Headers, replicas: Sequence[Replica]
    ) -> list[httpx.Response | None]:
        """The answers of these replicas, in order; ``None`` of one that gives none in time."""
        keys = {name: headers[name] for name in ("authorization", "x-api-key") if name in headers}
        return await asyncio.gather(*(self._ask(method, path, keys, replica) for replica in replicas))

    async def _ask(
        self, method: str, path: str, headers: dict[str, str], replica: Replica
    ) -> httpx.Response | None:
        try:
            request = httpx.Request(
                method,
                f"http://{replica.address}{path}",
                headers=headers,
                content=b"",
                extensions={"timeout": {"connect": REPLICA_SECONDS, "read": REPLICA_SECONDS}},
            )
            return await asyncio.wait_for(self._answer(request), REPLICA_SECONDS)
        except (httpx.TransportError, httpx.InvalidURL, asyncio.TimeoutError):
            return None  # an id that fits into no URL is nobody's

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(request)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response


def _is_ok(answer: httpx.Response | None) -> bool:
    return answer is not None and answer.status_code < 400
