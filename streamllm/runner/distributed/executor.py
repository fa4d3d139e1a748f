"""The executor of a model that workers run: the engine's side."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamllm.errors import EngineDeadError, InvalidRequestError
from streamllm.ops.lora import LoraAdapter
from streamllm.runner.distributed.messages import Ping, Pong, Returned, Sample, SentAdapter, Submit
from streamllm.runner.distributed.transport import FrameChannel, packed
from streamllm.runner.distributed.worker_link import WorkerCalls, WorkerLink, end_workers
from streamllm.runner.executor import Masks, RunningStep
from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.runner.micro_batches import StepInParts, split
from streamllm.runner.pending_runner import RunnerSize
from streamllm.runner.token_rules import LogitsProcessor

PING_SECONDS = 1.0

_ENDING_SECONDS = 0.02
"""Between two looks at how a worker ended."""


class DistributedExecutor:
    """Has workers compute steps (a :class:`streamllm.runner.executor.StepExecutor`).

    Every worker gets every step; the first one's output counts. One that dies or hangs takes the engine with
    it, for a part of the model and of the KV cache is gone.

    Args:
        links: the workers, by rank, ready for steps.
        calls: calls their methods.
        size: what they have loaded.
        close_launcher: called when they have ended.
        read_adapter: an adapter with a name in a folder, checked against the model.
        worker_timeout: seconds without a sign of life after which a worker counts as hung.
        num_stages: of a pipeline: steps are cut into as many parts, of which each stage computes another.

    Attributes:
        queue_depth: steps that may be submitted before the first of them has returned.
    """

    def __init__(
        self,
        links: Sequence[WorkerLink],
        calls: WorkerCalls,
        size: RunnerSize,
        close_launcher: Callable[[], None],
        read_adapter: Callable[[str, Path], LoraAdapter],
        worker_timeout: float,
        *,
        num_stages: int = 1,
    ) -> None:
        self.size = size
        # The first stage does not know of a token before it has been here.
        self.queue_depth = size.queue_depth if num_stages == 1 else 1
        self._num_stages = num_stages
        self._links = links
        self._calls = calls
        self._close_launcher = close_launcher
        self._read_adapter = read_adapter
        self._worker_timeout = worker_timeout
        self._channels: list[FrameChannel] = []
        self._awaited: list[deque[_WorkersStep]] = [deque() for _ in links]
        self._unanswered_pings = [0] * len(links)
        self._timer: asyncio.TimerHandle | None = None
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._failure: str | None = None
        # Sequences whose logits pass through processors, by slot.
        self._processed: dict[int, int] = {}
        self._adapters = _SentAdapters(calls)

    def start(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        for link in self._links:
            take, end = functools.partial(self._take, link), functools.partial(self._ended, link)
            self._channels.append(FrameChannel(link.steps, take, end))
        self._ping()

    def submit(self, batch: ScheduledBatch) -> RunningStep:
        parts = split(batch, self._num_stages)
        steps = [self._submit(part) for part in parts]
        return steps[0] if len(steps) == 1 else StepInParts(batch, parts, steps)

    def _submit(self, batch: ScheduledBatch) -> _WorkersStep:
        step = _WorkersStep(self, len(self._links), self._is_exclusive(batch))
        for awaited in self._awaited:
            awaited.append(step)
        self.send(Submit(batch))
        return step

    def prepare_processors(self, processors: tuple[LogitsProcessor, ...]) -> tuple[LogitsProcessor, ...]:
        return tuple(map(CarriedProcessor.of, processors))

    def read_adapter(self, name: str, path: str) -> LoraAdapter:
        """Reads it here and sends it to the workers, which keep the weights.

        Raises:
            EngineDeadError: a worker is gone.
        """
        return self._adapters.send(self._read_adapter(name, Path(path)))

    def close(self) -> None:
        """Ends the workers."""
        self._unwatch()
        end_workers(self._links, [link.launched for link in self._links])
        self._close_launcher()

    def send(self, message: Any) -> None:
        """Sends a message to all workers, behind those before it."""
        data = packed(message)
        for channel in self._channels:
            channel.send(data)

    def fail(self, reason: str) -> None:
        """Ends all workers at once: no step can be computed any more."""
        if self._failure is not None:
            return
        self._failure = reason
        for link in self._links:
            link.launched.kill()
        self._unwatch()
        self._on_failure(reason)
        for step in {step for awaited in self._awaited for step in awaited}:
            step.fail(EngineDeadError(reason))

    def fail_later(self, step: _WorkersStep, worker: int) -> None:
        """A worker has failed a step: the others must fail it too, and not wait for what it does not do."""

        def fail_now() -> None:
            if not step.is_done:
                self.fail(f"{self._links[worker].name} failed a step, which the others did not")

        asyncio.get_running_loop().call_later(self._worker_timeout, fail_now)

    def partly_failed(self, link: WorkerLink) -> None:
        """A worker has failed a step that others have computed. What a stage sent it for that step, the next
        step would take for its own."""
        if self._num_stages > 1:
            self.fail(f"{link.name} failed a step, which others did not")

    def _is_exclusive(self, batch: ScheduledBatch) -> bool:
        """As the workers' runners will say (:meth:`ModelRunner.start`), whom nobody has time to ask."""
        for slot in batch.finished_slots:
            self._processed.pop(slot, None)
        for sequence in batch.new_sequences:
            if sequence.rules is not None and sequence.rules.processors:
                self._processed[sequence.slot] = sequence.sequence_id
        if self.queue_depth == 1 or batch.prompt_rows or batch.pool_rows:
            return True
        processed = set(self._processed.values())
        return any(row.sequence_id in processed for row in batch.output_rows)

    def _take(self, link: WorkerLink, message: Returned | Pong) -> None:
        self._unanswered_pings[link.rank] = 0
        if isinstance(message, Returned):
            self._awaited[link.rank].popleft().take(link, message)

    def _ping(self) -> None:
        """Counts the pings since a worker's last sign of life. The loop itself may have stood still: then no
        ping was sent, and none is missing."""
        limit = self._worker_timeout / PING_SECONDS
        for link in self._links:
            if self._unanswered_pings[link.rank] > limit:
                self.fail(f"{link.name} has given no sign of life for {self._worker_timeout:g} s")
                return
            self._unanswered_pings[link.rank] += 1
        self.send(Ping())
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)

    def _ended(self, link: WorkerLink, tries: int = 25) -> None:
        """A connection has closed. How its worker ended is known a moment later."""
        ending = link.launched.ending()
        if ending is None and tries:
            asyncio.get_running_loop().call_later(_ENDING_SECONDS, self._ended, link, tries - 1)
            return
        self.fail(f"{link.name} {ending or 'has closed its connection'}")

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for channel in self._channels:
            channel.close()


class _WorkersStep:
    """A step that all workers compute."""

    def __init__(self, executor: DistributedExecutor, num_workers: int, exclusive: bool) -> None:
        self.exclusive = exclusive
        self._executor = executor
        self._num_missing = self._num_workers = num_workers
        self._failed: list[WorkerLink] = []
        self._failure: Exception | None = None
        self._output: StepOutput | None = None
        self._done: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()

    @property
    def is_done(self) -> bool:
        return self._done.done()

    def sample(self, masks: Masks | None = None) -> None:
        self._executor.send(Sample(dict(masks) if masks else None))

    async def output(self) -> StepOutput:
        return await asyncio.shield(self._done)

    def take(self, link: WorkerLink, returned: Returned) -> None:
        """A worker is done with it."""
        self._num_missing -= 1
        if returned.failure is not None:
            self._failed.append(link)
        if returned.failure is not None and self._failure is None:
            self._failure = returned.failure.unpacked(link.name)
            if self._num_missing:
                self._executor.fail_later(self, link.rank)
        self._output = self._output or returned.output
        if self._num_missing or self._done.done():
            return
        if self._failure is not None:
            self._done.set_exception(self._failure)
            if len(self._failed) < self._num_workers:
                self._executor.partly_failed(self._failed[0])
        else:
            assert self._output is not None
            self._done.set_result(self._output)

    def fail(self, error: Exception) -> None:
        """It will not be computed."""
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # whoever waited may have been cancelled: nobody needs to hear of it


class _SentAdapters:
    """Adapters that the workers have, and how many of the engine's objects stand for each."""

    def __init__(self, calls: WorkerCalls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._num_uses: Counter[bytes] = Counter()
        # Filled by the garbage collector, on any thread and at any moment, so no lock may be needed.
        self._collected: deque[bytes] = deque()

    def send(self, adapter: LoraAdapter) -> LoraAdapter:
        """What stands for an adapter in the engine; the workers drop its weights some time after that is
        collected."""
        with self._lock:
            self._drop_collected()
            if not self._num_uses[adapter.content]:
                self._calls.call("add_adapter", adapter)
            self._num_uses[adapter.content] += 1
            sent = SentAdapter.of(adapter)
            weakref.finalize(sent, self._collected.append, adapter.content).atexit = False
            return sent

    def _drop_collected(self) -> None:
        dropped = []
        while self._collected:
            content = self._collected.popleft()
            self._num_uses[content] -= 1
            if not self._num_uses[content]:
                dropped.append(content)
        if dropped:
            self._calls.call("drop_adapters", dropped)


@dataclass(frozen=True)
class CarriedProcessor:
    """A logits processor that travels: unpickled, it is the processor.

    Attributes:
        data: the pickled processor.
    """

    data: bytes

    @classmethod
    def of(cls, processor: LogitsProcessor) -> CarriedProcessor:
        """
        Raises:
            InvalidRequestError: the processor cannot be sent to the workers.
        """
        try:
            return cls(_pickled(processor))
        except Exception as error:
            raise InvalidRequestError(
                f"logits_processors: {processor!r} cannot be sent to the workers ({error}); "
                "pip install cloudpickle, or make it a function or class of a module.",
                param="logits_processors",
            ) from error

    def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], logits: np.ndarray
    ) -> np.ndarray:
        return pickle.loads(self.data)(prompt_ids, output_ids, logits)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def _pickled(processor: LogitsProcessor) -> bytes:
    """With cloudpickle, which also takes what is made inside of functions, where there is one."""
    try:
        import cloudpickle
    except ImportError:
        data = pickle.dumps(processor)
        if b"__main__" in data:
            raise ValueError("it belongs to a script, which the workers do not run") from None
        return data
    return cloudpickle.dumps(processor)
