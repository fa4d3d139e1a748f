"""Who starts an engine's workers and ends them: processes of this machine."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from streamllm.config import EngineConfig
from streamllm.errors import ConfigError
from streamllm.runner.distributed.messages import WorkerStart
from streamllm.runner.distributed.placement import Placement, place_workers

COMMAND = ("-m", "streamllm.runner.distributed.process")


class LaunchedWorker(Protocol):
    """A worker that has been started.

    Attributes:
        name: for people: ``"worker 1 (pid 4242)"``.
        threads: of its CPU kernels.
    """

    name: str
    threads: int

    def ending(self) -> str | None:
        """How it ended (``"was killed by SIGKILL"``); ``None``: it lives, as far as is known."""

    def end(self) -> None:
        """Its engine has no more work for it, and will close its connections: then it ends by itself."""

    def kill(self) -> None:
        """Ends it, whatever it does, without waiting; harmless when it has ended."""

    def wait(self, timeout: float) -> None:
        """Returns when it has ended, or after ``timeout`` seconds."""


class Launcher(Protocol):
    """
    Attributes:
        host: where the engine must listen for the workers; ``None``: a Unix socket will do.
        shares_files: whether the workers see the engine's files.
    """

    host: str | None
    shares_files: bool

    def launch(self, starts: Sequence[WorkerStart]) -> Sequence[LaunchedWorker]:
        """Starts the workers, by rank.

        Raises:
            ConfigError: there is no place for them.
        """

    def close(self) -> None:
        """After all workers have ended."""


class ProcessLauncher:
    """Workers as child processes.

    Raises:
        ConfigError: there are fewer GPUs, or cores, than workers.
    """

    host: str | None = None
    shares_files = True

    def __init__(self, config: EngineConfig) -> None:
        self._placements = place_workers(config)

    def launch(self, starts: Sequence[WorkerStart]) -> list[LaunchedWorker]:
        workers: list[LaunchedWorker] = []
        try:
            for start, placement in zip(starts, self._placements, strict=True):
                workers.append(WorkerProcess(start, placement))
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        return workers

    def close(self) -> None:
        pass


class WorkerProcess:
    """A worker in a process of this machine (the protocol :class:`LaunchedWorker`)."""

    def __init__(self, start: WorkerStart, placement: Placement) -> None:
        # The worker imports what the engine does, from wherever that has it, and nothing from where it runs.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", **placement.environment}
        try:
            self._process = subprocess.Popen(
                [sys.executable, *COMMAND], stdin=subprocess.PIPE, env=os.environ | environment
            )
        except OSError as error:
            raise ConfigError(f"a worker process cannot be started: {error.strerror or error}.") from None
        self.name = f"worker {start.rank} (pid {self._process.pid})"
        self.threads = placement.threads
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            pickle.dump((placement.cpus, pickle.dumps(start)), stdin)

    def ending(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"exited with code {code}"
        # Nobody else kills what asks for too much memory.
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def end(self) -> None:
        pass

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return
