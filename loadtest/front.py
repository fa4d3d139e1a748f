"""What a token costs between the model and the socket: tokens a second that one core delivers.

The server runs on one core, with everything real but the model, which costs nothing: admission, scheduler,
blocks, detokenisation, chunks, HTTP. The client, raw sockets on another core, asks for so many streams at
once. Beside it, on the same core, in turns: Starlette's StreamingResponse that sends one of the same chunks,
ready-made, again and again (uvicorn, uvloop and httptools too).

Figures are tokens per second of the server's own CPU time, so that neighbours on the machine count less, and
by the clock.

    python loadtest/front.py [--streams 32 256] [--tokens 400] [--rounds 3] [--json FILE] [--check]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from free_model import free_engine
from servers import free_port, server

STREAMS = (32, 256)
GOAL_TOKENS, GOAL_STREAMS = 25_000, 256
GOAL_SHARE = 0.6
"""Of what the ready-made chunks reach."""


# -- the two servers, each a process of its own --------------------------------------------------------------


def serve_engine(port: int) -> None:
    """streamllm's server over the free model."""
    from streamllm.config import ServerConfig
    from streamllm.server.run import calm_garbage_collector, make_server

    sock = socket.create_server(("127.0.0.1", port), backlog=1024)
    free = make_server(free_engine(max(STREAMS)), ServerConfig())
    calm_garbage_collector()
    free.run(sockets=[sock])


def serve_ready_made(port: int, chunk: bytes) -> None:
    """Starlette's StreamingResponse: ``POST /TOKENS`` sends ``chunk`` so many times."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            # As tokens come: one chunk a stream, then the next stream's turn.
            await asyncio.sleep(0)
            yield chunk

    async def stream(request: Request) -> Response:
        await request.body()
        return StreamingResponse(chunks(request.path_params["count"]), media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return Response()

    routes = [Route("/health", health), Route("/{count:int}", stream, methods=["POST"])]
    sock = socket.create_server(("127.0.0.1", port), backlog=1024)
    config = uvicorn.Config(Starlette(routes=routes), loop="uvloop", http="httptools", log_level="warning")
    uvicorn.Server(config).run(sockets=[sock])


@contextlib.contextmanager
def pinned_server(role: str, core: int, *extra: str) -> Iterator[int]:
    """One of the servers on a core; gives its port."""
    port = free_port()
    here = Path(__file__)
    command = [sys.executable, str(here), "--role", role, "--port", str(port), "--core", str(core), *extra]
    path = os.pathsep.join([str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with server(command, log, f"http://127.0.0.1:{port}/health", environment={"PYTHONPATH": path}):
            yield port


# -- the client ----------------------------------------------------------------------------------------------


def http_request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: front\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


def drive(port: int, requests: list[bytes]) -> tuple[float, int, bytes]:
    """Send all requests at once and read their streams to the end.

    Returns:
        (seconds, events of all streams, the first stream's bytes).
    """
    selector = selectors.DefaultSelector()
    first = bytearray()
    events = 0
    ends_open: dict[int, bool] = {}
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in requests]
    for sock in sockets:
        selector.register(sock, selectors.EVENT_READ)
    began = time.perf_counter()
    for sock, request in zip(sockets, requests, strict=True):
        sock.sendall(request)
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            if not data:
                selector.unregister(key.fileobj)
                continue
            events += data.count(b"\n\n") + (ends_open.get(key.fd, False) and data.startswith(b"\n"))
            ends_open[key.fd] = data.endswith(b"\n") and not data.endswith(b"\n\n")
            if key.fileobj is sockets[0]:
                first += data
    seconds = time.perf_counter() - began
    for sock in sockets:
        sock.close()
    return seconds, events, bytes(first)


def cpu_seconds(port: int) -> float:
    """CPU time of the process that listens on a loopback port, all threads together."""
    threads = Path(f"/proc/{_listener(port)}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _listener(port: int) -> int:
    wanted = f":{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(row[9] for row in rows if row[1].endswith(wanted) and row[3] == "0A")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"socket:[{inode}]":
                return int(link.parts[2])
    raise RuntimeError(f"nobody listens on port {port}")


def measure(port: int, requests: list[bytes], tokens: int) -> dict[str, float]:
    """One round: tokens a second by the clock and by the server's CPU time, and events a token."""
    before = cpu_seconds(port)
    seconds, events, _ = drive(port, requests)
    total = tokens * len(requests)
    cpu = cpu_seconds(port) - before
    # One event a stream is [DONE].
    return {
        "clock": total / seconds,
        "core": total / cpu,
        "events": (events - len(requests)) / total,
    }


def completion(number: int, tokens: int) -> bytes:
    """A streamed completion with a prompt of its own."""
    body = {"prompt": f"Story number {number}: once upon a time", "max_tokens": tokens, "stream": True}
    return http_request("/v1/completions", {**body, "temperature": 0, "ignore_eos": True})


def run(streams: list[int], tokens: int, rounds: int, cores: tuple[int, int]) -> list[dict[str, Any]]:
    """One row a number of streams, with medians over the rounds."""
    os.sched_setaffinity(0, {cores[1]})
    results = []
    with pinned_server("engine", cores[0]) as port:
        _, _, sample = drive(port, [completion(0, 8)])
        chunk = sample.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1]
        with pinned_server("ready-made", cores[0], "--chunk", chunk.hex()) as bare_port:
            for count in streams:
                asked = [completion(number, tokens) for number in range(count)]
                bare = [http_request(f"/{tokens}", {})] * count
                rows: dict[str, list[dict[str, float]]] = {"engine": [], "ready-made": []}
                for _ in range(rounds):
                    rows["engine"].append(measure(port, asked, tokens))
                    rows["ready-made"].append(measure(bare_port, bare, tokens))
                results.append({"streams": count, **{name: _median(row) for name, row in rows.items()}})
    return results


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


# -- what it says --------------------------------------------------------------------------------------------


def render(results: list[dict[str, Any]]) -> str:
    lines = ["streams   tokens/s of a core   by the clock   ready-made, of a core   share   chunks/token"]
    for row in results:
        engine, bare = row["engine"], row["ready-made"]
        lines.append(
            f"{row['streams']:7,} {engine['core']:20,.0f} {engine['clock']:14,.0f} {bare['core']:23,.0f} "
            f"{engine['core'] / bare['core']:6.0%} {engine['events']:13.2f}"
        )
    return "\n".join(lines)


def shortfalls(results: list[dict[str, Any]]) -> list[str]:
    """The goals that are missed, in words."""
    missed = []
    for row in results:
        if row["streams"] != GOAL_STREAMS:
            continue
        reached, bare = row["engine"]["core"], row["ready-made"]["core"]
        if reached < GOAL_TOKENS:
            missed.append(f"{row['streams']} streams: {reached:,.0f} tokens/s of a core")
        if reached < GOAL_SHARE * bare:
            missed.append(f"{row['streams']} streams: {reached / bare:.0%} of ready-made chunks")
    return missed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    for name in ("--role", "--chunk"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--port", "--core"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.role:
        os.sched_setaffinity(0, {options.core})
        if options.role == "engine":
            serve_engine(options.port)
        else:
            serve_ready_made(options.port, bytes.fromhex(options.chunk))
        return 0
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed: one for the server, one for the client")
    results = run(options.streams, options.tokens, options.rounds, (cores[0], cores[1]))
    print(render(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    missed = shortfalls(results)
    for line in missed:
        print(f"missed: {line}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
