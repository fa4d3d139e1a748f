"""Workers as actors of a Ray cluster, on one machine or several.

An actor runs the same function as a worker process, and connects back to the engine: Ray starts workers,
places them and notices when they end; nothing of a step goes through it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

from streamllm.config import EngineConfig
from streamllm.errors import ConfigError
from streamllm.ray_cluster import check_address
from streamllm.runner.distributed.launchers import LaunchedWorker
from streamllm.runner.distributed.messages import WorkerStart

INSTALL = "pip install 'streamllm[ray]'"
ADDRESS_VARIABLE = "RAY_ADDRESS"
END_SECONDS = 5.0
PLACEMENT_SECONDS = 60.0
"""What a cluster gets to make room, which may have to start machines for it."""

_ERROR = re.compile(r"[\w.]*Error: ")


class RayLauncher:
    """Workers on the cluster that ``$RAY_ADDRESS`` names, or on one that is started on this machine.

    Raises:
        ConfigError: one line: Ray is not installed, the cluster does not answer, or has not enough devices.
    """

    shares_files = False

    def __init__(self, config: EngineConfig) -> None:
        self._ray, self._is_own = _connected()
        self.host: str | None = self._ray.util.get_node_ip_address()
        self._resource = "GPU" if config.resolved_backend == "cuda" else "CPU"
        self._amount = float(1 if self._resource == "GPU" else config.threads or 1)
        self._group = self._placed(config)

    def launch(self, starts: Sequence[WorkerStart]) -> list[LaunchedWorker]:
        hosts = self._hosts()
        return [
            RayWorker(self._ray, self._actor(start.rank), start, int(self._amount), hosts[start.rank])
            for start in starts
        ]

    def close(self) -> None:
        with contextlib.suppress(Exception):  # of a cluster that is gone
            self._ray.util.remove_placement_group(self._group)
        if self._is_own:
            self._ray.shutdown()

    def _hosts(self) -> dict[int, str]:
        """The address of each rank's machine."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        placed = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return {rank: addresses[node] for rank, node in placed.items()}

    def _actor(self, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        amounts = {"num_cpus": 0, "num_gpus": 0, f"num_{self._resource.lower()}s": self._amount}
        actor = self._ray.remote(max_restarts=0, max_concurrency=2)(_Actor)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return actor.options(scheduling_strategy=strategy, **amounts).remote()

    def _placed(self, config: EngineConfig) -> Any:
        """A place for each worker: all on one machine where that has room, else on as few as possible."""
        count = config.world_size
        each = {self._resource: self._amount}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        available = sum(int(node.get(self._resource, 0) // self._amount) for node in nodes)
        if available < count:
            raise ConfigError(
                f"{config.world_flags} needs {count} times {self._amount:g} {self._resource}, and the "
                f"Ray cluster has room for {available} ({len(nodes)} nodes)."
            )
        fits = any(node.get(self._resource, 0) >= count * self._amount for node in nodes)
        for strategy, seconds in (("STRICT_PACK", 5.0 if fits else 0.0), ("PACK", PLACEMENT_SECONDS)):
            group = self._ray.util.placement_group([each] * count, strategy=strategy)
            if group.wait(seconds):
                return group
            self._ray.util.remove_placement_group(group)
        raise ConfigError(
            f"the Ray cluster gave no place to {count} workers within {PLACEMENT_SECONDS:g} s: others use "
            f"its {self._resource}s (`ray status` shows who)."
        )


class RayWorker:
    """A worker in an actor (the protocol :class:`LaunchedWorker`)."""

    def __init__(self, ray: Any, actor: Any, start: WorkerStart, threads: int, host: str) -> None:
        self._ray, self._actor = ray, actor
        self._rank, self._host = start.rank, host
        self.name = f"worker {start.rank} (on {host})"
        self.threads = threads
        self._running = actor.run.remote(start)
        self._pid = actor.pid.remote()

    def ending(self) -> str | None:
        self._learn_name()
        done, _ = self._ray.wait([self._running], timeout=0)
        if not done:
            return None
        try:
            self._ray.get(self._running)
        except self._ray.exceptions.RayActorError as error:
            # One that could not even be made, because its machine lacks a module, says so at the end.
            reason = _last_line(error)
            return f"has died ({reason})" if _ERROR.match(reason) else "has died"
        except Exception as error:
            return f"failed ({_last_line(error)})"
        return "has ended"

    def end(self) -> None:
        # One that ends by itself looks to Ray like one that has crashed.
        self._ray.kill(self._actor)
        self.wait(END_SECONDS)

    def kill(self) -> None:
        # Asks the cluster, which may not answer.
        threading.Thread(target=self._ray.kill, args=(self._actor,), daemon=True).start()

    def wait(self, timeout: float) -> None:
        self._ray.wait([self._running], timeout=timeout)

    def _learn_name(self) -> None:
        if self._pid is not None and self._ray.wait([self._pid], timeout=0)[0]:
            with contextlib.suppress(Exception):
                self.name = f"worker {self._rank} (pid {self._ray.get(self._pid)} on {self._host})"
            self._pid = None


class _Actor:
    """What runs on the cluster."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, start: WorkerStart) -> None:
        from streamllm.runner.distributed.worker import run_worker

        run_worker(start)


def _connected() -> tuple[Any, bool]:
    """Ray, connected to a cluster, and whether that was done here."""
    try:
        import ray
    except ImportError:
        raise ConfigError(f"--distributed-executor-backend ray needs the extra ray: {INSTALL}.") from None
    if ray.is_initialized():
        return ray, False
    address = os.environ.get(ADDRESS_VARIABLE)
    check_address(address, f"${ADDRESS_VARIABLE}")
    try:
        ray.init(address=address, log_to_driver=True, logging_level="warning", configure_logging=False)
    except Exception as error:
        raise ConfigError(
            f"the Ray cluster{f' at {address}' if address else ''} cannot be used: {_why_refused(error)}"
        ) from None
    return ray, True


def _why_refused(error: BaseException) -> str:
    """What Ray says, in a line; its own last word is that it did not connect."""
    said = str(error).strip().splitlines()[0]
    cause: BaseException | None = error
    while cause is not None:
        if "InvalidAuthToken" in str(cause):
            return (
                "it asks for a token, and has been shown none or another ($RAY_AUTH_MODE, $RAY_AUTH_TOKEN)."
            )
        cause = cause.__cause__ or cause.__context__
    return said


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
