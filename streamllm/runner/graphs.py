"""CUDA graphs of the forward: one launch instead of hundreds.

A step of nothing but decodes is one graph, attention included: what the kernels attend to stands in device
memory. In any other step the shapes of attention depend on the batch, so the forward is captured in pieces
that end at each layer's attention, which runs between them as it is. Either kind has a ladder of sizes; a
step runs as the next larger one, its padding writing nothing and attending to nothing.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from streamllm.ops.gpu.device_inputs import DeviceBatch
from streamllm.ops.gpu.gpu_ops import AttentionCall, GpuOps
from streamllm.ops.gpu.tensor_memory import unowned

Replay = Callable[[], None]

LARGEST_PIECEWISE = 512
"""Tokens up to which a mixed step is replayed; the kernels of larger ones take longer than their launches."""


class GraphRecorder(Protocol):
    """Records what is launched from :meth:`begin` to :meth:`end`."""

    def begin(self) -> None: ...

    def launch(self, operation: Callable[[], Any]) -> None:
        """Runs an operation, whose effect on its tensors is recorded."""

    def end(self) -> Replay:
        """What does it all again, on the same memory."""

    def share(self, tensor: Tensor) -> Tensor:
        """A tensor of a recording as what comes after may keep it: graphs may use its memory again."""


class CudaGraphRecorder:
    """Captures CUDA graphs that share one pool of memory: they are replayed one after the other, and nothing
    in it outlives a step. The current stream must not be the default one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may wait for events meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def launch(self, operation: Callable[[], Any]) -> None:
        operation()

    def end(self) -> Replay:
        self._graph.capture_end()
        return self._graph.replay

    def share(self, tensor: Tensor) -> Tensor:
        return unowned(tensor)


@dataclass(frozen=True)
class ForwardGraph:
    """A recorded forward.

    Attributes:
        pieces: in order; attention calls are made for the batch at hand.
        hidden: ``[tokens, hidden_size]``, valid until another graph is replayed.
    """

    pieces: tuple[Replay | AttentionCall, ...]
    hidden: Tensor

    def replay(self, ops: GpuOps, batch: DeviceBatch) -> Tensor:
        for piece in self.pieces:
            if isinstance(piece, AttentionCall):
                ops.attend(piece, batch)
            else:
                piece()
        return self.hidden


class ForwardGraphs:
    """The ladders, and what is recorded for their sizes.

    Args:
        recorder: how graphs are recorded.
        max_sequences: of a step; the decode ladder ends there.
        max_tokens: of a step; the ladder of mixed steps ends there, or at :data:`LARGEST_PIECEWISE`.

    Attributes:
        decode_sizes, mixed_sizes: ascending.
    """

    def __init__(self, recorder: GraphRecorder, *, max_sequences: int, max_tokens: int):
        self._recorder = recorder
        self.decode_sizes = ladder(min(max_sequences, max_tokens))
        self.mixed_sizes = ladder(min(max_tokens, LARGEST_PIECEWISE))
        self._graphs: dict[tuple[bool, int], ForwardGraph] = {}

    @property
    def num_graphs(self) -> int:
        """Forwards that there are graphs for when all are captured."""
        return len(self.decode_sizes) + len(self.mixed_sizes)

    def padded(self, num_tokens: int, *, only_decodes: bool) -> int | None:
        """The size that a step of so many tokens runs as; ``None`` where there is no graph for it."""
        sizes = self.decode_sizes if only_decodes else self.mixed_sizes
        place = bisect.bisect_left(sizes, num_tokens)
        return sizes[place] if place < len(sizes) else None

    def graph(self, num_tokens: int, *, only_decodes: bool) -> ForwardGraph:
        """The graph of one of the sizes."""
        return self._graphs[only_decodes, num_tokens]

    def capture(
        self,
        ops: GpuOps,
        forward: Callable[[DeviceBatch], Tensor],
        batch_of: Callable[[int], DeviceBatch],
    ) -> Iterator[None]:
        """Records the graphs, the largest first so that the others find their memory in its; yields after
        each of them.

        Args:
            ops: what ``forward`` calls.
            forward: computes the hidden states of a batch.
            batch_of: a batch of so many tokens of padding.
        """
        sizes = [(True, size) for size in self.decode_sizes] + [(False, size) for size in self.mixed_sizes]
        with _no_garbage_collection():
            for only_decodes, size in sorted(sizes, key=lambda pair: -pair[1]):
                batch = batch_of(size)
                forward(batch)  # compiles kernels and takes workspaces, which a capture must not do
                record = self._record_whole if only_decodes else self._record_pieces
                self._graphs[only_decodes, size] = record(ops, forward, batch)
                yield

    def _record_whole(
        self, ops: GpuOps, forward: Callable[[DeviceBatch], Tensor], batch: DeviceBatch
    ) -> ForwardGraph:
        recorder = self._recorder
        with _launching_by(ops, recorder.launch, split=None):
            recorder.begin()
            hidden = forward(batch)
            return ForwardGraph((recorder.end(),), recorder.share(hidden))

    def _record_pieces(
        self, ops: GpuOps, forward: Callable[[DeviceBatch], Tensor], batch: DeviceBatch
    ) -> ForwardGraph:
        recorder = self._recorder
        pieces: list[Replay | AttentionCall] = []

        def split(call: AttentionCall) -> None:
            pieces.append(recorder.end())
            pieces.append(AttentionCall(recorder.share(call.out), recorder.share(call.q), call.attention))
            recorder.begin()

        with _launching_by(ops, recorder.launch, split=split):
            recorder.begin()
            hidden = forward(batch)
            pieces.append(recorder.end())
        return ForwardGraph(tuple(pieces), recorder.share(hidden))


def ladder(largest: int) -> list[int]:
    """1, 2, 4, multiples of 8 up to 256, of 16 beyond, and ``largest`` itself; ascending."""
    steps: Iterable[int] = [1, 2, 4, *range(8, 256, 8), *range(256, largest, 16)]
    return [size for size in steps if size < largest] + [largest]


@contextmanager
def _launching_by(
    ops: GpuOps, launch: Callable[[Callable[[], Any]], None], split: Callable[[AttentionCall], None] | None
) -> Iterator[None]:
    before = ops.launch, ops.split
    ops.launch, ops.split = launch, split
    try:
        yield
    finally:
        ops.launch, ops.split = before


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection during a capture could free what the capture must not touch."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
