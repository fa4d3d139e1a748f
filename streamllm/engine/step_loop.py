"""The engine's loop: schedules, submits and delivers step after step.

With one step in flight at a time (a CPU) the loop delivers step *n* while the forward of step *n + 1* runs
in native threads: detokenises, looks for stop strings, feeds streams, fills grammar masks. With a queue of
two (a GPU) step *n + 1* has been submitted before step *n* returns, and step *n* is delivered while it runs;
step *n + 2* is scheduled after that. Either way a stop string costs at most one wasted token, which is
dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from streamllm.engine.output_processor import OutputProcessor
from streamllm.engine.request import SequenceUpdate
from streamllm.engine.scheduler import Scheduler
from streamllm.engine.step_history import Delivery, StepHistory, StepRecord
from streamllm.engine.step_observer import StepObserver
from streamllm.engine.structured import GrammarMasks
from streamllm.runner.executor import RunningStep, StepExecutor
from streamllm.runner.messages import ScheduledBatch, StepOutput

logger = logging.getLogger("streamllm.engine")

MAX_FAILED_STEPS = 3
"""Steps that may raise one after the other before the engine gives up."""


@dataclass(slots=True)
class _Submitted:
    """A step in flight.

    Attributes:
        error: what went wrong on the loop's side after its submission.
        doomed: a step before it has failed, and so have its sequences: whatever it gives is dropped.
    """

    batch: ScheduledBatch
    step: RunningStep
    record: StepRecord
    error: Exception | None = None
    doomed: bool = False


class StepLoop:
    """
    Args:
        scheduler: says what to compute.
        executor: computes it.
        outputs: delivers it.
        masks: fills the grammars' masks.
        observer: notes what each step computes.
        history: where steps are kept.

    Attributes:
        num_steps: steps that have returned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        outputs: OutputProcessor,
        masks: GrammarMasks,
        observer: StepObserver,
        history: StepHistory,
    ) -> None:
        self.num_steps = 0
        self._scheduler = scheduler
        self._executor = executor
        self._outputs = outputs
        self._masks = masks
        self._observer = observer
        self._history = history
        self._in_flight: deque[_Submitted] = deque()
        self._oldest_since = 0.0
        self._undelivered: list[SequenceUpdate] = []
        self._landed: list[StepRecord] = []
        self._num_failed = 0
        self._work = asyncio.Event()

    @property
    def step_seconds(self) -> float:
        """For how long the oldest step in flight has been running; 0 between steps."""
        return time.monotonic() - self._oldest_since if self._in_flight else 0.0

    def wake(self) -> None:
        """There is work."""
        self._work.set()

    async def run(self) -> None:
        """Serves until it is cancelled.

        Raises:
            Exception: what :data:`MAX_FAILED_STEPS` steps in a row raised; the engine cannot go on.
        """
        try:
            while True:
                while self._accepts_step and self._start_step():
                    pass
                if self._in_flight:
                    await self._land()
                else:
                    await self._idle()
        finally:
            self._in_flight.clear()

    async def _idle(self) -> None:
        """Waits for work."""
        self._deliver()
        if self._scheduler.has_work:
            raise RuntimeError("the scheduler has work and schedules none of it")
        self._work.clear()
        await self._work.wait()

    @property
    def _accepts_step(self) -> bool:
        in_flight = self._in_flight
        return not in_flight or (
            len(in_flight) < self._executor.queue_depth and not in_flight[-1].step.exclusive
        )

    def _start_step(self) -> bool:
        """Schedules and submits a step, if one is to be computed now."""
        began = time.monotonic()
        batch = self._scheduler.schedule()
        record = self._observer.scheduled(batch, began)
        if batch is None or record is None:
            return False
        self._submit(batch, record)
        return True

    def _submit(self, batch: ScheduledBatch, record: StepRecord) -> None:
        if not self._in_flight:
            self._oldest_since = record.scheduled
        submitted = _Submitted(batch, self._executor.submit(batch), record)
        self._in_flight.append(submitted)
        record.submitted = time.monotonic()
        # Before another step is scheduled: who has ended by a stop string has no part in it.
        self._deliver()
        masks = None
        record.mask_began = time.monotonic()
        try:
            masks = self._masks.fill(self._scheduler.in_flight(batch).outputs, self._outputs.fail)
        except Exception as error:
            submitted.error = error
        submitted.step.sample(masks)
        record.masked = time.monotonic()

    async def _land(self) -> None:
        """Waits for the oldest step and takes in what it gives."""
        submitted = self._in_flight[0]
        submitted.record.wait_began = time.monotonic()
        try:
            output = await submitted.step.output()
            if submitted.error is not None:
                raise submitted.error
        except Exception as error:
            self._returned()
            self._fail(submitted, error)
        else:
            self._returned()
            self._take(submitted, output)
        submitted.record.updated = time.monotonic()
        if self._in_flight:
            # The next one is running; without one delivery would keep the model waiting.
            self._deliver()

    def _returned(self) -> None:
        record = self._in_flight.popleft().record
        record.returned = self._oldest_since = time.monotonic()
        self._landed.append(record)

    def _take(self, submitted: _Submitted, output: StepOutput) -> None:
        if submitted.doomed:
            submitted.record.failed = True
            self._scheduler.drop_step(submitted.batch)
            return
        self._undelivered += self._scheduler.update(submitted.batch, output)
        self.num_steps += 1
        self._num_failed = 0

    def _fail(self, submitted: _Submitted, error: Exception) -> None:
        """End the requests of a step that raised, and of those behind it, which built on it."""
        batch = submitted.batch
        submitted.record.failed = True
        if submitted.doomed:
            self._scheduler.drop_step(batch)
            return
        logger.error("step %d failed", batch.step, exc_info=error)
        self._undelivered += self._scheduler.fail_step(batch, f"the model failed: {error}")
        for later in self._in_flight:
            later.doomed = True
        self._num_failed += 1
        if self._num_failed == MAX_FAILED_STEPS:
            self._deliver()
            raise error

    def _deliver(self) -> None:
        updates, self._undelivered = self._undelivered, []
        landed, self._landed = self._landed, []
        if not landed:
            return
        began = time.monotonic()
        delivery = self._outputs.process(updates)
        # Several only after failures: what was delivered is the last one's then.
        for record in landed[:-1]:
            record.deliver_began = record.delivered = began
            self._history.add(record, Delivery(began))
        landed[-1].deliver_began, landed[-1].delivered = began, time.monotonic()
        self._history.add(landed[-1], delivery)
