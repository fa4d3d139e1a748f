"""Replicas without Ray: real servers over the fake model, one that breaks off, and a gateway in front."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from helpers.fake_engine import make_engine

from streamllm.config import ServerConfig
from streamllm.deploy.gateway import gateway_app
from streamllm.deploy.load_ledger import LoadLedger
from streamllm.deploy.prefix_router import PrefixRouter
from streamllm.deploy.replica_server import ReplicaServer
from streamllm.deploy.replicas import Replica, RoutingRequest


class FixedReplicas:
    """Replicas by the real router, without Serve; the first of those that may be chosen if ``in_order``."""

    def __init__(self, replicas: Sequence[Replica], *, in_order: bool = False) -> None:
        self.running = list(replicas)
        self.requests: list[RoutingRequest] = []
        self.ledger = LoadLedger()
        self._in_order = in_order
        self._router: PrefixRouter[str] = PrefixRouter(seed=0)
        for replica in replicas:
            self._router.set_load(replica.id, 0.0)

    def all(self) -> Sequence[Replica]:
        return self.running

    async def choose(self, request: RoutingRequest) -> Replica:
        allowed = [replica for replica in self.running if replica.id not in request.exclude]
        if not allowed:
            await asyncio.Event().wait()
        self.requests.append(request)
        chosen = allowed[0].id
        if not self._in_order:
            chosen = self._router.choose(request.hashes, request.cost, request.exclude).replica
        self.ledger.sent(chosen, request.cost, 0.0)
        return next(replica for replica in allowed if replica.id == chosen)

    def ended(self, replica: Replica, request: RoutingRequest) -> None:
        self.ledger.ended(replica.id, request.cost, 0.0)

    def counters(self) -> dict[str, int]:
        return {"num_decisions": len(self.requests)}


@contextlib.contextmanager
def real_replica(
    rank: int, data_dir: Path, *, step_seconds: float = 0.0, **settings: object
) -> Iterator[tuple[Replica, ReplicaServer]]:
    """A replica over the fake model, with its server; stopped at the end if it is not yet."""
    config = ServerConfig(host="127.0.0.1", data_dir=str(data_dir / str(rank)), access_log="off", **settings)
    engine = make_engine(step_seconds=step_seconds, num_blocks=512, max_model_len=2048)
    server = ReplicaServer(engine, config)
    try:
        yield Replica(f"replica{rank}", server.host, server.port, rank), server
    finally:
        server.stop()


@contextlib.contextmanager
def breaking_replica(answer: bytes, rank: int = 0) -> Iterator[Replica]:
    """Says ``answer`` to each request once it has come whole, and closes the connection."""

    def serve() -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except OSError:
                return
            with connection:
                received = b""
                while b"\r\n\r\n" not in received:
                    received += connection.recv(65536)
                head, _, body = received.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                while len(body) < length:
                    body += connection.recv(65536)
                connection.sendall(answer)

    sock = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Replica(f"breaking{rank}", "127.0.0.1", sock.getsockname()[1], rank)
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        thread.join(5)


@contextlib.contextmanager
def gateway(replicas: FixedReplicas, **settings: object) -> Iterator[str]:
    """A gateway in front of the replicas; gives its URL."""
    app = gateway_app(replicas, ServerConfig(**settings))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", server_header=False))
    sock = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fails if the condition does not come true in time."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen in time")
