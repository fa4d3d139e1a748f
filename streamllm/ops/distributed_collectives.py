"""Collectives of ``torch.distributed``: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

MAX_SENDING = 8
"""Tensors on their way, of which copies are kept. A stage of a pipeline goes on with the next part of a step
while the stage behind it is still busy with the one before."""


class DistributedCollectives:
    """A process group as one of its processes (the protocol :class:`streamllm.ops.collectives.Collectives`).

    A rank that does not come, or has gone, is a ``RuntimeError`` after the group's timeout at the latest.

    Args:
        group: of gloo or NCCL; ``None``: the default group, which must have been initialised.
    """

    def __init__(self, group: ProcessGroup | None = None):
        self._group: ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment]
        self.rank, self.size = self._group.rank(), self._group.size()
        self._sending: deque[tuple[dist.Work | None, Tensor]] = deque()
        # The group's own methods: torch's functions around them cost a sixth of a small sum over gloo.
        self._sum, self._all = AllreduceOptions(), AllgatherOptions()
        self._sum.asyncOp = self._all.asyncOp = False  # on the current stream of a GPU

    def all_reduce(self, tensor: Tensor) -> None:
        total = tensor.contiguous()
        if self.size > 2 and tensor.dtype == torch.float32:
            # Either library sums an element in an order that depends on its place in the tensor.
            first, second, *others = self._gather(total)
            torch.add(first, second, out=total)
            for part in others:
                total += part
        else:
            self._group.allreduce([total], self._sum).wait()
        if total is not tensor:
            tensor.copy_(total)

    def gather_columns(self, tensor: Tensor, out: Tensor, widths: Sequence[int]) -> None:
        padded = tensor.contiguous()
        if tensor.shape[1] < max(widths):
            padded = tensor.new_zeros(len(tensor), max(widths))
            padded[:, : tensor.shape[1]] = tensor
        for part, columns in zip(self._gather(padded), out.split(list(widths), dim=1), strict=True):
            columns.copy_(part[:, : columns.shape[1]])

    def send(self, tensor: Tensor, rank: int) -> None:
        if tensor.is_cuda:  # the stream goes on when the tensor is in NCCL's buffers
            dist.send(tensor.contiguous(), group=self._group, group_dst=rank)
            return
        if len(self._sending) == MAX_SENDING:
            work, _ = self._sending.popleft()
            if work is not None:
                work.wait()
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self._sending.append((dist.isend(copy, group=self._group, group_dst=rank), copy))

    def receive(self, tensor: Tensor, rank: int) -> None:
        received = tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape)
        dist.recv(received, group=self._group, group_src=rank)
        if received is not tensor:
            tensor.copy_(received)

    def _gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """Every rank's tensor, all of one shape, in the order of the ranks."""
        parts = tensor.new_empty(self.size, *tensor.shape).unbind()
        self._group.allgather([list(parts)], [tensor], self._all).wait()
        return parts
