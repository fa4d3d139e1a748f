"""The executor: a model runner's phases as awaitables of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.runner.model_runner import ModelRunner


class Executor:
    """Runs a model runner in this process without ever blocking the loop.

    With native plans the loop watches the runner's event fd: no Python thread has to win the interpreter lock
    back. A runner without one computes in a single thread of its own.

    A step is :meth:`submit`, :meth:`forward_done`, :meth:`sample`; the last runs all of the runner's phases
    after the forward. What a step raises comes out of the last two; the executor stays usable.
    """

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._phase: asyncio.Future[None] | None = None
        self._thread = None if runner.event_fd is not None else ThreadPoolExecutor(1, "streamllm-step")

    def submit(self, batch: ScheduledBatch) -> None:
        """Starts the step's forward and returns. Call it on the running loop."""
        self._phase = self._begin(self.runner.start, batch)

    async def forward_done(self) -> None:
        """Returns when the submitted forward is done."""
        if self._phase is None:
            raise RuntimeError("no step has been submitted")
        await asyncio.shield(self._phase)

    async def forward(self, batch: ScheduledBatch) -> None:
        """:meth:`submit`, then :meth:`forward_done`."""
        self.submit(batch)
        await self.forward_done()

    async def sample(self, masks: Mapping[int, np.ndarray] | None = None) -> StepOutput:
        """Computes logits and samples, after the forward is done; ``masks`` as in
        :meth:`ModelRunner.sample`."""
        loop = asyncio.get_running_loop()
        if self._thread is not None:
            return await asyncio.shield(loop.run_in_executor(self._thread, self.runner.finish, masks))
        for work in self.runner.sample(masks):
            if work is None:
                self._phase = self._submitted(loop)
                await asyncio.shield(self._phase)
            else:
                await asyncio.shield(loop.run_in_executor(None, work))
        return self.runner.result()

    def close(self) -> None:
        """Waits for what runs, stops watching, closes the runner."""
        self._unwatch()
        if self._thread is not None:
            self._thread.shutdown()
        self.runner.close()

    def _begin(self, start: Callable[..., None], *args: Any) -> asyncio.Future[None]:
        """Starts a phase. The future lives as long as the phase, even if who awaits it is cancelled."""
        loop = asyncio.get_running_loop()
        if self._thread is not None:
            return loop.run_in_executor(self._thread, self._run, start, *args)
        try:
            start(*args)
        except Exception as error:
            failed: asyncio.Future[None] = loop.create_future()
            failed.set_exception(error)
            return failed
        return self._submitted(loop)

    def _submitted(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """The future of the native phase that has been submitted, or that was done at once."""
        self._watch(loop)
        phase: asyncio.Future[None] = loop.create_future()
        if not self.runner.in_flight:
            phase.set_result(None)
        return phase

    def _run(self, start: Callable[..., None], *args: Any) -> None:
        start(*args)
        self.runner.wait()

    def _on_readable(self) -> None:
        error: Exception | None = None
        try:
            self.runner.wait()
        except Exception as caught:
            error = caught
        if self._phase is None or self._phase.done():
            return
        if error is not None:
            self._phase.set_exception(error)
        else:
            self._phase.set_result(None)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            self._unwatch()
            loop.add_reader(self.runner.event_fd, self._on_readable)  # type: ignore[arg-type]
            self._loop = loop

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self.runner.event_fd is not None:
            self._loop.remove_reader(self.runner.event_fd)
        self._loop = None
