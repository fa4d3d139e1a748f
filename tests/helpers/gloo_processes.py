"""Ranks of a gloo group as processes of this machine."""

from __future__ import annotations

import datetime
import multiprocessing
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT = 60.0
"""Seconds for all that the ranks do."""


def run_processes(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(collectives, *args)`` in as many new processes at once; what it returns, by rank. What one
    raises is raised here. No process outlives the call.

    Args:
        function: of a module's top level.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(
                target=_rank, args=(writer, f"{folder}/store", rank, size, function, args), daemon=True
            )
            for rank, (_, writer) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            return [_result(reader, rank) for rank, (reader, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(reader: Any, rank: int) -> Any:
    if not reader.poll(TIMEOUT):
        raise TimeoutError(f"rank {rank} has not ended within {TIMEOUT:.0f} s")
    succeeded, result = reader.recv()
    if not succeeded:
        raise AssertionError(f"rank {rank}:\n{result}")
    return result


def _rank(
    writer: Any, store: str, rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    from streamllm.ops.distributed_collectives import DistributedCollectives

    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(store).as_uri(),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=TIMEOUT / 2),
        )
        result = (True, function(DistributedCollectives(), *args))
    except BaseException:
        result = (False, traceback.format_exc())
    writer.send(result)
    signal.pause()  # until all have their results: others may still talk to this rank
