"""The executor: a model runner's phases as awaitables of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from streamllm.ops.lora import LoraAdapter
from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.runner.model_runner import ModelRunner, StartedStep
from streamllm.runner.token_rules import LogitsProcessor

Result = TypeVar("Result")

Masks = Mapping[int, np.ndarray]
"""Output row -> what its grammar allows, as in :meth:`ModelRunner.sample`. They must stay as they are until
the step has returned."""


class RunningStep(Protocol):
    """A step that has been submitted: :meth:`sample` once, then :meth:`output`.

    Attributes:
        exclusive: no step may be submitted before this one has returned.
    """

    exclusive: bool

    def sample(self, masks: Masks | None = None) -> None:
        """Lets the step draw its tokens when its forward is done."""

    async def output(self) -> StepOutput:
        """Returns when the step is done; raises what it raised. Steps are awaited in order."""


class StepExecutor(Protocol):
    """What computes an engine's steps, in its own process or in others.

    Attributes:
        queue_depth: steps that may be submitted before the first of them has returned.
    """

    queue_depth: int

    def start(self, on_failure: Callable[[str], None]) -> None:
        """The engine starts, on the running loop.

        Args:
            on_failure: called on the loop, once and with the reason, if no step can be computed any more.
        """

    def submit(self, batch: ScheduledBatch) -> RunningStep:
        """Starts the step's forward, behind those in flight, and returns. Call it on the running loop."""

    def prepare_processors(self, processors: tuple[LogitsProcessor, ...]) -> tuple[LogitsProcessor, ...]:
        """What goes into the rules of a request with these logits processors; on any thread.

        Raises:
            InvalidRequestError: one of them cannot be called where the model is.
        """

    def read_adapter(self, name: str, path: str) -> LoraAdapter:
        """Reads the adapter in a folder, checks it against the model, and makes it ready for a slot; on any
        thread, while steps run too.

        Raises:
            ModelLoadError: as :func:`streamllm.models.lora_adapter.read_adapter` says.
        """

    def close(self) -> None:
        """Ends whatever computes; not used after."""


class Executor:
    """Runs a model runner in this process without ever blocking the loop (a :class:`StepExecutor`).

    With native plans and with a device the loop watches the runner's event fd: no Python thread has to win
    the interpreter lock back. A runner without one computes in a single thread of its own.

    What a step raises comes out of :meth:`RunningStep.output`; the executor stays usable.

    Attributes:
        queue_depth: steps that may be submitted before the first of them has returned.
    """

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.queue_depth = runner.queue_depth
        self._loop: asyncio.AbstractEventLoop | None = None
        # Phases that have been submitted and are not known to be done, in order, and what each gives.
        self._phases: deque[tuple[asyncio.Future[StepOutput | None], StartedStep | None]] = deque()
        self._thread = None if runner.event_fd is not None else ThreadPoolExecutor(1, "streamllm-step")

    def start(self, on_failure: Callable[[str], None]) -> None:
        """Nothing to do: what fails here takes the engine's process with it."""

    def prepare_processors(self, processors: tuple[LogitsProcessor, ...]) -> tuple[LogitsProcessor, ...]:
        return processors

    def submit(self, batch: ScheduledBatch) -> RunningStep:
        if self._thread is not None:
            return _StepInThread(self.runner, self._thread, batch)
        return _Step(self, batch)

    def read_adapter(self, name: str, path: str) -> LoraAdapter:
        return self.runner.read_adapter(name, path)

    def close(self) -> None:
        """Waits for what runs, stops watching, closes the runner."""
        self._unwatch()
        if self._thread is not None:
            self._thread.shutdown()
        self.runner.close()

    def submitted(self, step: StartedStep | None = None) -> asyncio.Future[StepOutput | None]:
        """The future of the phase that has just been submitted, or that was done at once.

        Args:
            step: the step that this phase ends; the future then gives its output.
        """
        loop = asyncio.get_running_loop()
        self._watch(loop)
        phase: asyncio.Future[StepOutput | None] = loop.create_future()
        if self.runner.in_flight > len(self._phases):
            self._phases.append((phase, step))
        else:
            phase.set_result(None)
        return phase

    def _on_readable(self) -> None:
        output, error = None, None
        phase, step = self._phases.popleft() if self._phases else (None, None)
        try:
            self.runner.wait()
            if step is not None:
                output = self.runner.result(step)
        except Exception as caught:
            error = caught
        if phase is None or phase.done():
            return
        if error is not None:
            phase.set_exception(error)
        else:
            phase.set_result(output)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            self._unwatch()
            loop.add_reader(self.runner.event_fd, self._on_readable)  # type: ignore[arg-type]
            self._loop = loop

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self.runner.event_fd is not None:
            self._loop.remove_reader(self.runner.event_fd)
        self._loop = None


class _Step:
    """A step whose phases signal the runner's event fd."""

    def __init__(self, executor: Executor, batch: ScheduledBatch) -> None:
        self._executor = executor
        self._masks: Masks | None = None
        self._error: Exception | None = None
        self.exclusive = True
        try:
            self._step = executor.runner.start(batch)
        except Exception as error:
            self._error = error
            return
        self.exclusive = self._step.exclusive
        if self.exclusive:
            self._phase = executor.submitted()

    def sample(self, masks: Masks | None = None) -> None:
        self._masks = masks
        if self.exclusive:
            return  # after the forward, which output() awaits
        try:
            next(self._executor.runner.sample(masks, self._step))
        except Exception as error:
            self._error = error
            return
        self._phase = self._executor.submitted(self._step)

    async def output(self) -> StepOutput:
        if self._error is not None:
            raise self._error
        # A phase goes on even if who awaits it is cancelled.
        output = await asyncio.shield(self._phase)
        return output if output is not None else await self._remaining_phases()

    async def _remaining_phases(self) -> StepOutput:
        executor, loop = self._executor, asyncio.get_running_loop()
        for work in executor.runner.sample(self._masks, self._step):
            if work is None:
                self._phase = executor.submitted()
                await asyncio.shield(self._phase)
            else:
                await asyncio.shield(loop.run_in_executor(None, work))
        return executor.runner.result(self._step)


class _StepInThread:
    """A step whose phases run as they are called, on the executor's thread."""

    exclusive = True

    def __init__(self, runner: ModelRunner, thread: ThreadPoolExecutor, batch: ScheduledBatch) -> None:
        self._runner, self._thread = runner, thread
        self._masks: Masks | None = None
        self._forward = self._in_thread(self._run_forward, batch)

    def sample(self, masks: Masks | None = None) -> None:
        self._masks = masks

    async def output(self) -> StepOutput:
        await asyncio.shield(self._forward)
        return await asyncio.shield(self._in_thread(self._runner.finish, self._masks))

    def _run_forward(self, batch: ScheduledBatch) -> None:
        self._runner.start(batch)
        self._runner.wait()

    def _in_thread(self, work: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
