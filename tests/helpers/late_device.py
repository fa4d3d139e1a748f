"""A GPU's stream at its slowest: on a CPU, nothing that was submitted is done before somebody waits for it.

What a step reads of memory that may have changed by then is read too late here, as it would be on a GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamllm.ops.gpu.reference import ReferenceKernels
from streamllm.runner.gpu_backend import GpuBackend
from streamllm.runner.graphs import GraphRecorder

SCRIBBLE = 77
"""What the runner's arrays are filled with as soon as a step's submission has returned."""

_INPUTS = (
    "token_ids", "rope_rows", "slot_mapping", "query_start", "context_lens", "slots", "output_rows",
    "output_slots",
)  # fmt: skip
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position", "target", "edits")


class LateStream(TorchDispatchMode):
    """Operations of torch and kernels wait in a queue.

    What gives a new tensor is computed at once for the sake of its shape, and again when its turn comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Callable[[], Any]] = deque()
        self._is_late = True

    def add(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)

    def run_next(self) -> None:
        """Does the oldest piece of work."""
        self._is_late = False
        try:
            self._queue.popleft()()
        finally:
            self._is_late = True

    def run_all(self) -> None:
        while self._queue:
            self.run_next()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = operation._schema, kwargs or {}
        makes_nothing = any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable
        if not self._is_late or makes_nothing or not any(isinstance(arg, torch.Tensor) for arg in args):
            return operation(*args, **kwargs)
        if schema.is_mutable:
            self.add(lambda: operation(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = operation(*args, **kwargs)
        self.add(lambda: result.copy_(operation(*args, **kwargs)))
        return result


class LateKernels(ReferenceKernels):
    """The reference's, each call when its turn comes."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not callable(found) or name.startswith("_"):
            return found
        return lambda *args, **options: self._stream.add(lambda: found(*args, **options))


class LateBackend(GpuBackend):
    """The GPU's backend on such a stream, from its first step on.

    Args:
        scribbles: overwrite the runner's arrays when a draw has been submitted: for steps that have nothing
            behind it.
    """

    def __init__(self, *, recorder: GraphRecorder | None = None, scribbles: bool = True) -> None:
        self._late = LateStream()
        self._is_prepared, self._scribbles = False, scribbles
        super().__init__(LateKernels(self._late), torch.device("cpu"), torch.float32, recorder=recorder)

    def prepare(self, *arguments: Any) -> None:
        super().prepare(*arguments)
        self._late.run_all()
        self._is_prepared = True

    def submit_sample(self) -> None:
        super().submit_sample()
        if not self._scribbles:
            return
        for arrays, names in ((self._inputs, _INPUTS), (self._sampling, _SETTINGS)):
            for name in names:
                getattr(arrays, name)[...] = SCRIBBLE

    def mark(self) -> None:
        descriptor, self.event_fd = self.event_fd, None  # the signal comes with the work
        super().mark()
        self.event_fd = descriptor
        self._late.add(lambda: os.eventfd_write(descriptor, 1))

    def wait(self) -> None:
        while self._marks and not self._is_signalled():
            self._late.run_next()
        super().wait()

    def hidden(self) -> np.ndarray:
        self._late.run_all()  # as copies to the host do that are waited for
        return self._hidden[: self._inputs.num_tokens].numpy()

    def logits(self) -> np.ndarray:
        self._late.run_all()
        return self._logits.numpy()

    def _is_signalled(self) -> bool:
        os.set_blocking(self.event_fd, False)
        try:
            os.eventfd_read(self.event_fd)
        except BlockingIOError:
            return False
        os.eventfd_write(self.event_fd, 1)
        return True

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with super()._on_stream(), self._late if self._is_prepared else contextlib.nullcontext():
            yield
