"""The executor: a model runner's phases as awaitables of the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from streamllm.runner.messages import ScheduledBatch, StepOutput
from streamllm.runner.model_runner import ModelRunner


class Executor:
    """Runs a model runner in this process without ever blocking the loop.

    With native plans the loop watches the runner's event fd: no Python thread has to win the interpreter lock
    back. A runner without one computes in a single thread of its own.

    A step is :meth:`submit`, :meth:`forward_done`, :meth:`sample`. What a step raises comes out of the last
    two; the executor stays usable.
    """

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: asyncio.Future[None] | None = None
        self._start: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._thread = None if runner.event_fd is not None else ThreadPoolExecutor(1, "streamllm-step")

    def submit(self, batch: ScheduledBatch) -> None:
        """Starts the step's forward and returns. Call it on the running loop."""
        self._error = None
        if self._thread is not None:
            self._start = asyncio.get_running_loop().run_in_executor(self._thread, self.runner.start, batch)
            return
        self._watch()
        try:
            self.runner.start(batch)
        except Exception as error:
            self._error = error

    async def forward_done(self) -> None:
        """Returns when the submitted forward is done."""
        if self._error is not None:
            raise self._error
        if self._start is not None:
            start, self._start = self._start, None
            await start
        await self._phase_done()

    async def forward(self, batch: ScheduledBatch) -> None:
        """:meth:`submit`, then :meth:`forward_done`."""
        self.submit(batch)
        await self.forward_done()

    async def sample(self) -> StepOutput:
        """Computes logits and samples, after the forward is done."""
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.runner.sample)
        else:
            self.runner.sample()
        await self._phase_done()
        return self.runner.result()

    def close(self) -> None:
        """Waits for what runs, stops watching, closes the runner."""
        self._unwatch()
        if self._thread is not None:
            self._thread.shutdown()
        self.runner.close()

    async def _phase_done(self) -> None:
        if self._thread is not None:
            self.runner.wait()
        elif self.runner.in_flight:
            self._done = asyncio.get_running_loop().create_future()
            try:
                await self._done
            finally:
                self._done = None

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._unwatch()
            loop.add_reader(self.runner.event_fd, self._on_readable)  # type: ignore[arg-type]
            self._loop = loop

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and self.runner.event_fd is not None:
            self._loop.remove_reader(self.runner.event_fd)
        self._loop = None

    def _on_readable(self) -> None:
        error: Exception | None = None
        try:
            self.runner.wait()
        except Exception as caught:
            error = caught
        if self._done is None or self._done.done():
            self._error = error
        elif error is not None:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
