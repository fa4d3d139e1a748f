"""When a worker begins the steps that it has been sent, and lets them draw."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from streamllm.runner.distributed.messages import Returned, Sample, Submit
from streamllm.runner.distributed.worker import Shard, StepServer
from streamllm.runner.messages import OutputRow, ScheduledBatch, ScheduledRow, StepOutput
from streamllm.runner.pending_runner import Share


class Worker:
    """A step server over an executor whose steps end when the test says so.

    Attributes:
        log: what has been done so far, a letter (b: begun, d: draws) and the step's number each.
        outputs: output rows of the steps that have begun.
        returned: what the engine has been sent.
    """

    def __init__(self, share: Share, queue_depth: int) -> None:
        self.queue_depth = queue_depth
        self.log: list[str] = []
        self.outputs: list[int] = []
        self.returned: list[Returned] = []
        self.ends: dict[int, asyncio.Future[StepOutput]] = {}
        shard = Shard(0)
        shard.share, shard.executor = share, self  # type: ignore[assignment]
        self.server = StepServer(shard)
        self.server.channel = SimpleNamespace(send=self._send)  # type: ignore[assignment]

    def submit(self, batch: ScheduledBatch) -> Any:
        self.log.append(f"b{batch.step}")
        self.outputs.append(len(batch.output_rows))
        end = self.ends[batch.step] = asyncio.get_running_loop().create_future()

        async def output() -> StepOutput:
            return await end

        return SimpleNamespace(
            exclusive=self.queue_depth == 1,
            sample=lambda masks: self.log.append(f"d{batch.step}"),
            output=output,
        )

    def take(self, *messages: Any) -> None:
        for message in messages:
            self.server.take(message)

    async def end(self, step: int, error: Exception | None = None) -> None:
        if error is None:
            self.ends[step].set_result(StepOutput([], [], []))
        else:
            self.ends[step].set_exception(error)
        for _ in range(5):
            await asyncio.sleep(0)

    def _send(self, data: bytes) -> None:
        self.returned.append(pickle.loads(data))


def submit(step: int) -> Submit:
    return Submit(ScheduledBatch(step, rows=[ScheduledRow(0, 0, 1, [], [])], output_rows=[OutputRow(0, 0)]))


def run(test: Any, share: Share, queue_depth: int) -> None:
    async def running() -> None:
        worker = Worker(share, queue_depth)
        task = asyncio.ensure_future(worker.server.run())
        await asyncio.sleep(0)
        await test(worker)
        task.cancel()

    asyncio.run(running())


LAST, FIRST = Share(stage=1, num_stages=2), Share(stage=0, num_stages=2)


def test_parts_of_a_step_are_computed_one_after_the_other():
    async def test(worker: Worker) -> None:
        worker.take(submit(0), submit(1), Sample(None), Sample(None))
        assert worker.log == ["b0", "d0"]
        await worker.end(0)
        assert worker.log == ["b0", "d0", "b1", "d1"]
        await worker.end(1)
        assert [returned.output is not None for returned in worker.returned] == [True, True]

    run(test, LAST, queue_depth=1)


def test_a_queue_takes_a_part_when_the_one_before_it_may_draw():
    async def test(worker: Worker) -> None:
        worker.take(submit(0), submit(1), submit(2))
        assert worker.log == ["b0"]
        worker.take(Sample(None), Sample(None), Sample(None))
        assert worker.log == ["b0", "d0", "b1", "d1"]
        await worker.end(0)
        assert worker.log[4:] == ["b2", "d2"]

    run(test, LAST, queue_depth=2)


def test_a_stage_that_draws_nothing_waits_for_no_masks():
    """So that it is done with a part before the engine has made the grammars' masks, and begins the next."""

    async def test(worker: Worker) -> None:
        worker.take(submit(0), submit(1))
        await worker.end(0)
        assert worker.log == ["b0", "d0", "b1", "d1"]
        worker.take(Sample(None), Sample(None))
        await worker.end(1)
        assert worker.outputs == [0, 0]
        assert [returned.output for returned in worker.returned] == [None, None]
        worker.take(submit(2))
        assert worker.log[4:] == ["b2", "d2"]

    run(test, FIRST, queue_depth=1)


@pytest.mark.parametrize("share", [FIRST, LAST])
def test_a_part_that_fails_does_not_keep_the_next_one(share):
    async def test(worker: Worker) -> None:
        worker.take(submit(0), submit(1), Sample(None), Sample(None))
        await worker.end(0, ValueError("it broke"))
        await worker.end(1)
        failure = worker.returned[0].failure
        assert failure is not None
        assert str(failure.error) == "it broke"
        assert worker.returned[1].failure is None

    run(test, share, queue_depth=1)
