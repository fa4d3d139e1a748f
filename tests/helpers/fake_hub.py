"""A Hugging Face hub on this machine: the part of its API that downloads need, with faults to order."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LFS = (".safetensors", ".bin", ".gguf")


@dataclass
class FakeHub:
    """What the hub holds and how it misbehaves.

    Attributes:
        repositories: files by repository id; those with weights count as stored in LFS.
        breaks_after: bytes of a body after which a connection is cut, one entry a request for weights; then
            never more.
        seconds_a_chunk: what 4 KiB of weights take.
        corrupts: files that are sent with one byte changed.
        stalls: seconds that every answer waits.
        knows_ranges: whether ``Range`` is honoured.
        redirects_to: address of the server that gives out what is stored in LFS, as the hub's CDN does.
        status: what is answered instead of files, if anything.
        requests: method, path and ``Range`` of all requests so far.
    """

    repositories: dict[str, dict[str, bytes]]
    commit: str = COMMIT
    breaks_after: list[int] = field(default_factory=list)
    corrupts: set[str] = field(default_factory=set)
    stalls: float = 0.0
    seconds_a_chunk: float = 0.0
    knows_ranges: bool = True
    redirects_to: str | None = None
    status: tuple[int, dict[str, str]] | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    address: str = ""

    def downloads(self) -> list[str]:
        """Names of the files that were asked for."""
        return [
            path.split("/resolve/")[1].split("/", 1)[1] for _, path, _ in self.requests if "/resolve/" in path
        ]

    def siblings(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        listed = []
        for name, content in files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
            if name.endswith(_LFS):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
            listed.append(entry)
        return listed


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        self.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        self.hub.tokens.add(self.headers.get("Authorization"))
        time.sleep(self.hub.stalls)
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            self.send_info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self.send_file(self.hub.repositories[match[1]][match[3]], match[3])
        else:
            self.refuse(404, {})

    def send_info(self, repo_id: str, revision: str) -> None:
        files = self.hub.repositories.get(repo_id)
        if files is None:
            return self.refuse(404, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", self.hub.commit):
            return self.refuse(404, {"X-Error-Code": "RevisionNotFound"})
        info = {"id": repo_id, "sha": self.hub.commit, "siblings": self.hub.siblings(files)}
        body = json.dumps(info).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, content: bytes, name: str) -> None:
        if self.hub.status is not None:
            return self.refuse(*self.hub.status)
        if self.hub.redirects_to and name.endswith(_LFS):
            return self.refuse(302, {"Location": self.hub.redirects_to + self.path})
        if name in self.hub.corrupts:
            content = content[:-1] + bytes([content[-1] ^ 1])
        first, wanted = 0, self.headers.get("Range")
        if wanted and self.hub.knows_ranges:
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            first, content = int(start), content[: int(last) + 1] if last else content
        self.send_response(206 if wanted and self.hub.knows_ranges else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        is_large = name.endswith(_LFS)
        limit = self.hub.breaks_after.pop(0) if is_large and self.hub.breaks_after else len(content)
        for start in range(first, min(first + limit, len(content)), 4096):
            self.wfile.write(content[start : min(start + 4096, first + limit)])
            time.sleep(self.hub.seconds_a_chunk if is_large else 0)
        if limit < len(content) - first:
            self.close_connection = True

    def refuse(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": "0"}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what the tests are about."""


@contextmanager
def serve_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    """Runs a hub; its address is for ``HF_ENDPOINT``."""
    hub = FakeHub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
