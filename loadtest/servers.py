"""Starting the engines that are compared: a server on a free port, or a worker that talks over its pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx

START_TIMEOUT = 900.0
"""Seconds that an engine may take to load: vLLM compiles its model at its first start."""
STOP_TIMEOUT = 30.0
_LOG_LINES = 8


class EngineFailure(Exception):
    """An engine that did not start, died, or did other work than it was asked for; says which and why."""


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def process(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    pipes: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """A child in a process group of its own, stopped at the end together with whatever it has started.

    Args:
        command: the program and its arguments.
        log: file for its standard error, and for its standard output unless ``pipes``.
        environment: variables on top of this process's.
        pipes: give it a standard input and output to talk over, as text.

    Raises:
        EngineFailure: the program cannot be run.
    """
    with log.open("w") as output:
        try:
            child = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailure(f"{command[0]} cannot be run: {error}") from error
        try:
            yield child
        finally:
            _stop(child)


def _stop(child: subprocess.Popen[str]) -> None:
    pipe: IO[str] | None
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_TIMEOUT)
    # Whatever the child started and left behind would go on using the cores.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def server(
    command: Sequence[str], log: Path, health_url: str, *, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A server, ready: ``health_url`` answers 200. Raises :class:`EngineFailure` with the end of its log."""
    with process(command, log, environment=environment) as child:
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(health_url):
            if child.poll() is not None:
                raise EngineFailure(
                    f"ended with exit code {child.returncode} at its start\n{last_lines(log)}"
                )
            if time.monotonic() > deadline:
                raise EngineFailure(f"not ready after {START_TIMEOUT:g} s\n{last_lines(log)}")
            time.sleep(0.1)
        yield


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def last_lines(log: Path) -> str:
    """The end of a log, indented, for a message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-_LOG_LINES:])
