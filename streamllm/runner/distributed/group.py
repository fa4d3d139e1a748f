"""The process groups of an engine's workers."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from streamllm.config import EngineConfig
from streamllm.runner.distributed.transport import interface_of
from streamllm.runner.pending_runner import Share

TIMEOUT = timedelta(minutes=30)
"""For collectives. Ranks may load at very different speeds; one that dies or hangs is the engine's to notice,
which then ends all of them."""


def open_store(host: str, world_size: int) -> Any:
    """Where the ranks meet: rank 0's, on a free port of ``host``."""
    from torch.distributed import TCPStore

    return TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def join_groups(config: EngineConfig, store: Any, rendezvous: tuple[str, int], rank: int) -> Share:
    """Waits for all ranks: NCCL between GPUs, gloo between CPUs. Gives the rank's place among them.

    Args:
        store: of :func:`open_store` on rank 0, else ``None``.
        rendezvous: its host and port.
    """
    import torch.distributed as dist

    from streamllm.ops.distributed_collectives import DistributedCollectives

    size, num_stages, world_size = (
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        config.world_size,
    )
    if store is None:
        store = dist.TCPStore(*rendezvous, world_size, is_master=False, timeout=TIMEOUT)
    backend = "nccl" if config.resolved_backend == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    stage, own_rank = divmod(rank, size)
    # All ranks make all groups, in one order.
    stages = [range(first, first + size) for first in range(0, world_size, size)]
    pipelines = [range(first, world_size, size) for first in range(size)]
    made = {ranks: dist.new_group(list(ranks)) for ranks in (*stages, *pipelines) if len(ranks) > 1}
    return Share(
        own_rank,
        size,
        DistributedCollectives(made[stages[stage]]) if size > 1 else None,
        stage=stage,
        num_stages=num_stages,
        neighbours=DistributedCollectives(made[pipelines[own_rank]]) if num_stages > 1 else None,
    )


def use_interface_of(host: str) -> None:
    """Collectives use the network of ``host``, unless the user says otherwise: they would take what the
    machine's name resolves to, which often is an address that others cannot reach."""
    if (interface := interface_of(host)) is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
