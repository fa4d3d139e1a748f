"""Machines of a network, as far as their processes can tell: each has its own network, host name, processes
and mounts (Linux namespaces, so root only), and a node of a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from helpers.live_server import LiveServer

ADDRESSES = ("10.0.0.1", "10.0.0.2")
RAY_ENVIRONMENT = {
    "RAY_ADDRESS": f"{ADDRESSES[0]}:6379",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
"""Of all that has to do with the cluster, its engine too."""

_COMMANDS = ("ip", "nsenter", "unshare")
_RAY = (
    sys.executable,
    "-m",
    "ray.scripts.scripts",
    "start",
    "--block",
    "--disable-usage-stats",
    "--num-cpus=1",
)
_RAY_BYTES = ("--object-store-memory=80000000", "--memory=1000000000")
_START_SECONDS = 120.0


def missing_for_nodes() -> str | None:
    """What this machine lacks for such nodes; ``None``: nothing."""
    if importlib.util.find_spec("ray") is None:
        return "needs the extra ray"
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root on Linux"
    if lacking := [command for command in _COMMANDS if shutil.which(command) is None]:
        return f"needs {' and '.join(lacking)}"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], capture_output=True
    )
    return None if tried.returncode == 0 else "needs namespaces"


class Node:
    """A machine; a context manager. All that runs on it ends with it, and it with this process.

    Args:
        name: its host name.
        private: a folder of which it sees its own contents only.
    """

    def __init__(self, name: str, private: Path) -> None:
        self.name = name
        setup = (
            f"hostname {name} && ip link set lo up && mount -t tmpfs none {private} && "
            "mount -t tmpfs none /dev/shm && echo ready && exec cat"  # until standard input closes
        )
        namespaces = ("--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._process = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} did not start")
        self.pid = child_of(self._process.pid)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # with it goes the node's first process, and with that all others
        self._process.communicate()

    def command(self, *command: str) -> list[str]:
        """The command that runs another one here."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--ipc", "--pid", "--mount", *command]

    def run(self, *command: str) -> str:
        """What a command prints here.

        Raises:
            RuntimeError: it fails.
        """
        done = subprocess.run(self.command(*command), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stderr}{done.stdout}")
        return done.stdout

    @contextlib.contextmanager
    def instead_of(self, original: Path, other: Path) -> Iterator[None]:
        """Here alone, a file or folder has another one's contents."""
        self.run("mount", "--bind", str(other), str(original))
        try:
            yield
        finally:
            self.run("umount", "--lazy", str(original))

    def processes(self, word: str) -> list[str]:
        """State and command line of the processes here whose command line has a word."""
        lines = self.run("ps", "-eo", "stat=,args=").splitlines()
        return [line for line in lines if word in line and not line.startswith("Z") and " ps " not in line]


class NodeServer(LiveServer):
    """A server on a node, spoken to through a Unix socket in a folder that all nodes see.

    Args:
        environment: beside the test's own.
    """

    def __init__(
        self,
        node: Node,
        socket: Path,
        *flags: str,
        environment: Mapping[str, str] = RAY_ENVIRONMENT,
        timeout: float = 90.0,
    ) -> None:
        super().__init__("--uds", str(socket), *flags, timeout=timeout)
        variables = [f"{name}={value}" for name, value in environment.items()]
        self._command = node.command("env", *variables, *self._command)
        self._transport = httpx.HTTPTransport(uds=str(socket))

    def new_client(self) -> httpx.Client:
        return httpx.Client(transport=self._transport, base_url="http://node", timeout=60.0)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child_of(self.process.pid), number)


def child_of(pid: int) -> int:
    """The process's only child.

    Raises:
        ProcessLookupError: it has none, or is gone.
    """
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    except (OSError, ValueError):
        raise ProcessLookupError from None


@contextlib.contextmanager
def two_ray_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes, joined by a cable (``eth0`` on both) and to a Ray cluster, with a core each."""
    with tempfile.TemporaryDirectory(prefix="node-") as folder, contextlib.ExitStack() as running:
        private = Path(folder)
        one, two = (running.enter_context(Node(name, private)) for name in ("node-one", "node-two"))
        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(two.pid)]
        subprocess.run(
            ["nsenter", f"--target={one.pid}", "--net", "ip", "link", "add", "eth0", *cable], check=True
        )
        for node, address in zip((one, two), ADDRESSES, strict=True):
            node.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
            node.run("ip", "link", "set", "eth0", "up")
        head = [
            "--head",
            f"--port={RAY_ENVIRONMENT['RAY_ADDRESS'].partition(':')[2]}",
            "--include-dashboard=false",
        ]
        _start_ray(one, private, ADDRESSES[0], head)
        _start_ray(two, private, ADDRESSES[1], [f"--address={RAY_ENVIRONMENT['RAY_ADDRESS']}"])
        yield one, two


def _start_ray(node: Node, private: Path, address: str, flags: Sequence[str]) -> None:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **RAY_ENVIRONMENT}
    command = node.command(
        *_RAY, *flags, f"--node-ip-address={address}", f"--temp-dir={private}", *_RAY_BYTES
    )
    deadline = time.monotonic() + _START_SECONDS
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        while True:
            log.seek(0)
            printed = log.read()
            if "Ray runtime started" in printed:
                return
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start on {node.name}: {printed}")
            time.sleep(0.1)
