"""What the ranks of a group do together in the middle of a forward: sums, gathers, messages.

:class:`Collectives` works on torch tensors at once; :class:`BufferCollectives` on the buffers of an
:class:`~streamllm.ops.Ops`, at the calls' place among its operations. All ranks make the same calls in the
same order, with the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from streamllm.ops import Batch, Buffer, Ops

if TYPE_CHECKING:
    from torch import Tensor

    from streamllm.ops.gpu.gpu_ops import GpuOps
    from streamllm.ops.plan_recorder import PlanBuffer, PlanRecorder
    from streamllm.ops.torch_ops import TorchOps


class Collectives(Protocol):
    """A group of ranks, as one of them sees it.

    Tensors are ``[rows, width]``; their rows may lie apart. A call returns when ``tensor`` and ``out`` may be
    read and written again: on a GPU by what is launched after it.

    Attributes:
        rank: this one, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place, of a tensor of any shape; the same bits on every rank.

        In float32 an element is summed in one order whatever else the tensor holds.
        """

    def gather_columns(self, tensor: Tensor, out: Tensor, widths: Sequence[int]) -> None:
        """Every rank's ``tensor [rows, widths[rank]]`` side by side, in ``out [rows, sum(widths)]`` of every
        rank."""

    def send(self, tensor: Tensor, rank: int) -> None:
        """Gives a tensor to another rank, which receives one of its shape and dtype, without waiting until it
        does."""

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fills a tensor with what another rank sends."""


class BufferCollectives(Protocol):
    """The same over buffers ``[rows, width]`` of an :class:`~streamllm.ops.Ops`.

    Attributes:
        rank: this one, from 0.
        size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, x: Buffer) -> Buffer:
        """The sum of ``x`` over all ranks, in place."""

    def gather_columns(self, x: Buffer, widths: Sequence[int]) -> Buffer:
        """Every rank's ``x [rows, widths[rank]]`` side by side: ``[rows, sum(widths)]``, on every rank."""

    def send(self, x: Buffer, rank: int) -> None:
        """Gives a buffer to another rank."""

    def receive(self, width: int, rank: int, batch: Batch) -> Buffer:
        """``[tokens, width]`` as another rank sends it."""


def buffer_collectives(ops: Ops, collectives: Collectives) -> BufferCollectives:
    """Collectives over the buffers of ``ops``: recorded in its plans, or else launched as its operations."""
    if hasattr(ops, "host_call"):
        return _PlanCollectives(cast("PlanRecorder", ops), collectives)
    return _TensorCollectives(cast("TorchOps | GpuOps", ops), collectives)


class _PlanCollectives:
    """Host calls in native plans."""

    def __init__(self, recorder: PlanRecorder, collectives: Collectives):
        from torch import from_numpy

        self.rank, self.size = collectives.rank, collectives.size
        self._recorder, self._collectives = recorder, collectives
        self._tensor = from_numpy

    def all_reduce(self, x: PlanBuffer) -> PlanBuffer:
        self._recorder.host_call([x], lambda rows: self._collectives.all_reduce(self._with_gaps(rows)))
        return x

    def gather_columns(self, x: PlanBuffer, widths: Sequence[int]) -> PlanBuffer:
        out = self._recorder.new_buffer(sum(widths), on_outputs=x.on_outputs)

        def gather(rows: np.ndarray, out_rows: np.ndarray) -> None:
            self._collectives.gather_columns(self._tensor(rows), self._tensor(out_rows), widths)

        self._recorder.host_call([x, out], gather)
        return out

    def send(self, x: PlanBuffer, rank: int) -> None:
        self._recorder.host_call([x], lambda rows: self._collectives.send(self._with_gaps(rows), rank))

    def receive(self, width: int, rank: int, batch: Batch) -> PlanBuffer:
        out = self._recorder.new_buffer(width)
        self._recorder.host_call([out], lambda rows: self._collectives.receive(self._with_gaps(rows), rank))
        return out

    def _with_gaps(self, rows: np.ndarray) -> Tensor:
        """All elements from the first row to the last as one row. What lies between the rows of a buffer is
        nobody's, and to take it along costs less than a copy."""
        tensor = self._tensor(rows)
        if tensor.is_contiguous():
            return tensor
        stride = tensor.stride(0)
        return tensor.as_strided((1, (len(rows) - 1) * stride + rows.shape[1]), (stride, 1))


class _TensorCollectives:
    """Calls on torch tensors; where operations are launched, launched like them."""

    def __init__(self, ops: TorchOps | GpuOps, collectives: Collectives):
        self.rank, self.size = collectives.rank, collectives.size
        self._ops, self._collectives = ops, collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        self._launch(lambda: self._collectives.all_reduce(x))
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        import torch

        out = torch.empty(len(x), sum(widths), dtype=x.dtype, device=x.device)
        self._launch(lambda: self._collectives.gather_columns(x, out, widths))
        return out

    def send(self, x: Tensor, rank: int) -> None:
        self._launch(lambda: self._collectives.send(x, rank))

    def receive(self, width: int, rank: int, batch: Batch) -> Tensor:
        import torch

        out = torch.empty(batch.num_tokens, width, dtype=self._ops.dtype, device=self._ops.device)
        self._launch(lambda: self._collectives.receive(out, rank))
        return out

    def _launch(self, operation: Callable[[], Any]) -> None:
        launch = getattr(self._ops, "launch", None)
        if launch is None:
            operation()
        else:
            launch(operation)
