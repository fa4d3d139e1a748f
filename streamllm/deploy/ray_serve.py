"""streamllm as an application of Ray Serve: engines as replicas of one deployment, gateways as another.

In a Serve config file (https://docs.ray.io/en/latest/serve/production-guide/config.html)::

    applications:
      - name: streamllm
        route_prefix: /
        import_path: streamllm.deploy.ray_serve:app
        args:
          replicas: 2
          max_replicas: 8
          engine: {model: "org/name", max_model_len: 8192}
          server: {api_key: [KEY]}

Requests go to a gateway (:mod:`streamllm.deploy.gateway`), which takes the place of Serve's own way from the
ingress to a replica: Serve passes each piece of an answer on as a message between actors, at some 2 ms a
token on one core. The gateway asks Serve's request router for a replica and speaks HTTP to that by itself.
Everything else is Serve's: placing replicas, rebuilding those that die, scaling, draining.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import streamllm
from streamllm.config import EngineConfig, ServerConfig
from streamllm.deploy.replica_share import ReplicaShare, replica_share
from streamllm.deploy.replicas import DIRECTORY, Replica, RoutingRequest
from streamllm.errors import ConfigError
from streamllm.logs import stderr_handler
from streamllm.replica_settings import ReplicaConfig
from streamllm.settings import check_setting, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from streamllm.deploy.replica_server import ReplicaServer

INSTALL = "pip install 'streamllm[ray]'"

LOAD_PERIOD = 1.0
"""Seconds between two reports of a replica's load to the routers."""

HEALTH_PERIOD = 2.0
"""Seconds between two health checks: within this a replica's death is noticed."""

DRAIN_MARGIN = 10.0
"""Seconds beyond ``--shutdown-timeout`` after which Serve kills a replica that has not ended."""

UNLIMITED = 1_000_000
"""Requests at once: engines have queues and limits of their own."""


def import_serve() -> Any:
    """The module ``ray.serve``.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        from ray import serve
    except ImportError:
        raise ConfigError(f"--replicas needs the extra ray: {INSTALL}.") from None
    return serve


@dataclass(frozen=True, slots=True)
class Origin:
    """What all replicas must agree on.

    Attributes:
        version: of streamllm.
        model: of the model's files (:func:`streamllm.runner.distributed.fingerprint.fingerprint`); ``None``
            where whoever deploys does not have them.
    """

    version: str
    model: Mapping[str, str] | None = None

    def check(self, node: str, config: EngineConfig) -> None:
        """Raises:
        ConfigError: this node has another version, or other files of the model.
        """
        if streamllm.__version__ != self.version:
            raise ConfigError(
                f"the node {node} has streamllm {streamllm.__version__}, and this is {self.version}; install "
                "the same on all nodes."
            )
        if self.model is None:
            return
        from streamllm.runner.distributed.fingerprint import difference, fingerprint
        from streamllm.sources.resolve import resolve

        files = resolve(config.model, revision=config.revision, progress=False)
        differs = difference(dict(self.model), fingerprint(files))
        if differs is not None:
            raise ConfigError(
                f"the node {node} has another model: {differs}; use the same files on all nodes."
            )


class EngineReplica:
    """One engine, as Ray Serve runs it: Serve asks for its health, its load and how busy it is.

    Args:
        engine: settings of the engine, those that were given; defaults are made where it runs.
        server: of the whole; host, port, TLS and folder are the replica's own.
        origin: what must be the same on all nodes.
        host: where to listen; ``None``: the node's address.
    """

    def __init__(
        self, engine: Mapping[str, Any], server: ServerConfig, origin: Origin, host: str | None
    ) -> None:
        import ray

        from streamllm.engine.async_engine import AsyncEngine
        from streamllm.server.access_log import log_to_stdout
        from streamllm.server.run import calm_garbage_collector

        serve = import_serve()
        node = ray.util.get_node_ip_address()
        log_to_stderr()
        log_to_stdout()
        config = EngineConfig(**engine)
        origin.check(node, config)
        self._rank = serve.get_replica_context().rank.rank
        loaded = AsyncEngine.from_config(config)
        calm_garbage_collector()
        self._server = self._serve(loaded, own_config(server, host or node, self._rank))

    @staticmethod
    def _serve(engine: Any, config: ServerConfig) -> ReplicaServer:
        from streamllm.deploy.replica_server import ReplicaServer

        return ReplicaServer(engine, config)

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What the request router learns once, when the replica is ready."""
        return {"host": self._server.host, "port": self._server.port, "rank": self._rank}

    async def record_routing_stats(self) -> dict[str, float]:
        """What it learns every :data:`LOAD_PERIOD` seconds."""
        return await self._server.load()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy goes by."""
        return await self._server.use()

    async def check_health(self) -> None:
        """Serve builds the replica anew when this raises a few times."""
        await self._server.check()

    async def __del__(self) -> None:
        """Called by Serve when the replica is to end: requests may end first."""
        import asyncio

        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.stop)


def own_config(server: ServerConfig, host: str, rank: int) -> ServerConfig:
    """The settings of one replica's own server: plain HTTP on ``host``, and a folder of its own, which the
    replica that takes its place finds again."""
    from streamllm.server.database import data_folder

    return dataclasses.replace(
        server,
        host=host,
        uds=None,
        ssl_certfile=None,
        ssl_keyfile=None,
        ssl_ca_certs=None,
        ssl_cert_reqs=0,
        data_dir=str(data_folder(server) / f"replica-{rank}"),
    )


class ServeReplicas:
    """The replicas of a deployment, chosen by Serve's request router.

    Args:
        handle: of the deployment.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def all(self) -> Sequence[Replica]:
        return DIRECTORY.replicas

    async def choose(self, request: RoutingRequest) -> Replica:
        # Without reserving a place, which would ask the replica and have it count: engines queue themselves.
        async with self._handle.choose_replica(request, _reserve=False) as selection:
            known = selection.replica_metadata
            return Replica(selection.replica_id, known["host"], known["port"], known["rank"])

    def ended(self, replica: Replica, request: RoutingRequest) -> None:
        DIRECTORY.ended.append((replica.id, request.cost))

    def counters(self) -> dict[str, int]:
        return DIRECTORY.counters


class GatewayReplica:
    """The ingress: the gateway's application in a Serve replica.

    Args:
        engines: handle of the engines' deployment.
        server: settings of the server that they are together.
    """

    def __init__(self, engines: Any, server: ServerConfig) -> None:
        self._engines = engines
        self._config = server

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from streamllm.deploy.gateway import gateway_app

        log_to_stderr()
        return without_request_id(gateway_app(ServeReplicas(self._engines), self._config))


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Leaves out of answers the header that Serve sets itself, to the same value."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [item for item in message["headers"] if item[0].lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_rest)

    return wrapped


def log_to_stderr() -> None:
    """streamllm's own lines, which Ray passes on to whoever started the replicas."""
    package = logging.getLogger("streamllm")
    if not package.handlers:
        package.addHandler(stderr_handler())
        package.setLevel(logging.INFO)
        package.propagate = False


def app(args: Mapping[str, Any]) -> Any:
    """The application for a Serve config file.

    Args:
        args: ``engine`` and ``server``: settings by the names of ``streamllm serve``'s flags with
            underscores; those of :class:`ReplicaConfig` beside them. ``replicas`` is 1 if left out.

    Raises:
        ConfigError: a setting is unknown or wrong, or the cluster has too little.
    """
    own = {name: value for name, value in args.items() if name not in ("engine", "server")}
    if "ray_address" in own:
        raise ConfigError("ray_address does not go into a Serve config file: that is sent to a cluster.")
    engine, server = dict(args.get("engine") or {}), dict(args.get("server") or {})
    for name, given, known in (
        ("", own, ReplicaConfig), ("engine.", engine, EngineConfig), ("server.", server, ServerConfig)
    ):  # fmt: skip
        fields = {field.name for field in dataclasses.fields(known)}
        if unknown := sorted(given.keys() - fields):
            raise ConfigError(f"args of streamllm.deploy.ray_serve:app: there is no {name}{unknown[0]}.")
    replicas = ReplicaConfig(**{"replicas": 1, **own})
    return application(engine, ServerConfig(**server), replicas, Origin(streamllm.__version__))


def application(
    engine: Mapping[str, Any],
    server: ServerConfig,
    config: ReplicaConfig,
    origin: Origin,
    *,
    host: str | None = None,
) -> Any:
    """The application for ``serve.run``. Ray must be connected.

    Args:
        engine: settings of each engine, those that were given.
        server: settings of the server that they are together.
        origin: what replicas must agree on.
        host: where replicas listen; ``None``: on their node's address.

    Raises:
        ConfigError: Ray is not installed, or the cluster has too little.
    """
    import ray

    serve = import_serve()
    engine = {
        declared.name: check_setting(declared, engine[declared.name])
        for declared in settings_of(EngineConfig)
        if declared.name in engine
    }
    resources = ray.cluster_resources()
    assert config.replicas is not None
    share = replica_share(engine, resources, replicas=config.replicas, most_replicas=config.most_replicas)
    settings = {**engine} if share.threads is None else {**engine, "threads": share.threads}
    engines = _engine_deployment(serve, config, server, share).bind(settings, server, origin, host)
    gateway = serve.deployment(
        name="gateway",
        num_replicas=config.gateways,
        max_ongoing_requests=UNLIMITED,
        graceful_shutdown_timeout_s=server.shutdown_timeout + DRAIN_MARGIN,
        health_check_period_s=HEALTH_PERIOD,
        # The application in the thread that reads and writes: what is passed on changes no threads.
        ray_actor_options={
            "num_cpus": 0,
            "runtime_env": {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}},
        },
    )(serve.ingress()(GatewayReplica))
    return gateway.bind(engines, server)


def _engine_deployment(serve: Any, config: ReplicaConfig, server: ServerConfig, share: ReplicaShare) -> Any:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    number: dict[str, Any] = {"num_replicas": config.replicas}
    if config.is_autoscaled:
        policy = AutoscalingPolicy(
            policy_function="streamllm.deploy.autoscaling:QueuePolicy",
            policy_kwargs={
                "target_queued_tokens": config.target_queued_tokens,
                "target_first_token": config.target_first_token,
            },
        )
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=config.replicas, max_replicas=config.max_replicas, policy=policy
            )
        }
    return serve.deployment(
        name="engine",
        max_ongoing_requests=UNLIMITED,
        graceful_shutdown_timeout_s=server.shutdown_timeout + DRAIN_MARGIN,
        health_check_period_s=HEALTH_PERIOD,
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig(
            request_router_class="streamllm.deploy.request_router:PrefixAffinityRouter",
            request_routing_stats_period_s=LOAD_PERIOD,
        ),
        ray_actor_options={"num_cpus": share.num_cpus, "num_gpus": share.num_gpus},
        **number,
    )(EngineReplica)
