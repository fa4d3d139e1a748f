"""From a configuration to workers that are ready for steps."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from streamllm import __version__
from streamllm.config import EngineConfig
from streamllm.errors import ConfigError, ModelLoadError
from streamllm.ops.lora import LoraAdapter
from streamllm.runner.distributed.executor import DistributedExecutor
from streamllm.runner.distributed.fingerprint import difference, fingerprint
from streamllm.runner.distributed.launchers import LaunchedWorker, Launcher, ProcessLauncher
from streamllm.runner.distributed.messages import (
    Hello,
    LoadShard,
    Opened,
    WorkerSetup,
    WorkerStart,
    WorkerTraceback,
)
from streamllm.runner.distributed.transport import Listener, receive_blocking
from streamllm.runner.distributed.worker_link import WorkerCalls, WorkerEnded, WorkerLink, end_workers
from streamllm.runner.pending_runner import RunnerSize
from streamllm.sources.model_files import ModelFiles

logger = logging.getLogger("streamllm.engine")

CONNECT_SECONDS = 180.0
"""What workers have to start, import what they need, and connect."""


def start_executor(
    config: EngineConfig,
    files: ModelFiles,
    load: LoadShard,
    *,
    sampled_vocab_size: int,
    read_adapter: Callable[[str, Path], LoraAdapter],
) -> DistributedExecutor:
    """Starts the workers and lets them load the model.

    Args:
        files: the model, on the engine's machine.
        load: what each of them does to load its shard.
        sampled_vocab_size: ids below this are sampled.
        read_adapter: an adapter with a name in a folder, checked against the model.

    Raises:
        ConfigError: there are fewer devices than workers, something that they need is not installed, or
            their machines have other versions or other files.
        ModelLoadError: the model cannot be loaded, or a worker ended meanwhile.
    """
    _check_torch(config)
    config = _same_everywhere(config)
    launcher = _launcher(config)
    links: list[WorkerLink] = []
    workers: Sequence[LaunchedWorker] = ()
    with contextlib.ExitStack() as undo:
        undo.callback(launcher.close)
        undo.callback(lambda: end_workers(links, workers))
        try:
            key, level = os.urandom(32), logging.getLogger("streamllm").getEffectiveLevel()
            with Listener(launcher.host, key) as listener:
                starts = [WorkerStart(listener.address, key, r, level) for r in range(config.world_size)]
                workers = launcher.launch(starts)
                links += _connect(listener, workers)
            calls = WorkerCalls(links)
            size = _load(calls, links, config, files, load, sampled_vocab_size, launcher.shares_files)
        except WorkerEnded as error:
            raise ModelLoadError(f"{error} before it was ready; what it printed says why.") from None
        except (ConfigError, ModelLoadError) as error:
            if launcher.shares_files or not isinstance(error.__cause__, WorkerTraceback):
                raise
            raise type(error)(f"{error.__cause__.worker}: {error}") from error.__cause__
        undo.pop_all()
    return DistributedExecutor(
        links,
        calls,
        size,
        launcher.close,
        read_adapter,
        config.worker_timeout,
        num_stages=config.pipeline_parallel_size,
    )


def _same_everywhere(config: EngineConfig) -> EngineConfig:
    """The configuration as it means the same in another folder, and on a machine with other devices."""
    model = config.model
    if model is not None and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    return replace(config, model=model, backend=config.resolved_backend)


def _check_torch(config: EngineConfig) -> None:
    if config.world_size > 1 and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"{config.world_flags} needs the extra gpu, through whose torch "
            "the workers speak: pip install 'streamllm[gpu]'."
        )


def _launcher(config: EngineConfig) -> Launcher:
    if config.launcher == "ray":
        from streamllm.runner.distributed.ray_launcher import RayLauncher

        return RayLauncher(config)
    return ProcessLauncher(config)


def _connect(listener: Listener, workers: Sequence[LaunchedWorker]) -> list[WorkerLink]:
    """Waits until all workers have connected.

    Raises:
        ConfigError: one has another version.
        WorkerEnded: one ended, or did not come.
    """
    found: dict[tuple[int, str], socket.socket] = {}
    machines = [""] * len(workers)
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(found) < 2 * len(workers):
        connection = listener.accept(timeout=0.1)
        if connection is not None:
            hello: Hello = receive_blocking(connection)
            version, rank, role, _, machines[rank] = hello
            if version != __version__:
                raise ConfigError(
                    f"{workers[rank].name} on {machines[rank]} has streamllm {version}, and the engine on "
                    f"{platform.node()} {__version__}; install one version on all machines."
                )
            found[rank, role] = connection
        for worker in workers:
            if (ending := worker.ending()) is not None:
                raise WorkerEnded(f"{worker.name} {ending}")
        if time.monotonic() > deadline:
            late = next(rank for rank in range(len(workers)) if (rank, "steps") not in found)
            raise WorkerEnded(f"{workers[late].name} did not connect within {CONNECT_SECONDS:g} s")
    return [
        WorkerLink(rank, worker, machines[rank], found[rank, "calls"], found[rank, "steps"])
        for rank, worker in enumerate(workers)
    ]


def _load(
    calls: WorkerCalls,
    links: Sequence[WorkerLink],
    config: EngineConfig,
    files: ModelFiles,
    load: LoadShard,
    sampled_vocab_size: int,
    shares_files: bool,
) -> RunnerSize:
    """Lets the workers load the model and settle on a number of KV blocks.

    Args:
        files: where the engine finds the model.
        shares_files: the workers as well; else each looks on its own.

    Raises:
        ConfigError: a worker has found other files.
    """
    together = Counter(link.machine for link in links)
    setups = [
        WorkerSetup(
            config=config,
            files=files if shares_files else None,
            load=load,
            sampled_vocab_size=sampled_vocab_size,
            host=link.host,
            world_size=len(links),
            threads=link.launched.threads,
            num_here=together[link.machine],
        )
        for link in links
    ]
    opened: list[Opened] = calls.call_each("open", [(setup,) for setup in setups])
    expected = opened[0].fingerprint if shares_files else fingerprint(files)
    for link, own in zip(links, opened, strict=True):
        if (what := difference(expected, own.fingerprint)) is not None:
            raise ConfigError(
                f"{link.name} on {link.machine} has other model files than the engine on "
                f"{platform.node()}: {what}. All machines need the same."
            )
    blocks: list[int] = calls.call("load", opened[0].rendezvous)
    sizes: list[RunnerSize] = calls.call("make_runner", min(blocks))
    first = sizes[0]
    return RunnerSize(
        first.num_blocks,
        first.max_model_len,
        sum(size.weight_bytes for size in sizes),
        sum(size.kv_cache_bytes for size in sizes),
        min(size.queue_depth for size in sizes),
        first.place if len(sizes) == 1 else f"{len(sizes)} workers, each {first.place}",
    )
