"""What the engine does when some of its workers fail a step: here their ends are held by the test."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from streamllm.errors import EngineDeadError
from streamllm.runner.distributed.executor import DistributedExecutor
from streamllm.runner.distributed.messages import Failure, Returned, Sample, Submit
from streamllm.runner.distributed.transport import packed, receive_blocking, send_blocking
from streamllm.runner.distributed.worker_link import WorkerLink
from streamllm.runner.messages import OutputRow, ScheduledBatch, ScheduledRow, StepOutput
from streamllm.runner.pending_runner import RunnerSize

SIZE = RunnerSize(
    num_blocks=1, max_model_len=1, weight_bytes=1, kv_cache_bytes=1, queue_depth=1, place="nowhere"
)


class Workers:
    """Two of them.

    Attributes:
        killed: the ranks of those that were ended.
        reasons: why the engine was told that it is dead.
    """

    def __init__(self, num_stages: int) -> None:
        self.killed: list[int] = []
        self.reasons: list[str] = []
        self._sockets, links = [], []
        for rank in range(2):
            ours, theirs = socket.socketpair()
            self._sockets.append(theirs)
            launched: Any = SimpleNamespace(
                name=f"worker {rank}", kill=lambda rank=rank: self.killed.append(rank), ending=lambda: None
            )
            links.append(WorkerLink(rank, launched, "here", ours, ours))
        unused: Any = None
        self.executor = DistributedExecutor(
            links, unused, SIZE, lambda: None, unused, worker_timeout=60.0, num_stages=num_stages
        )
        self.executor.start(self.reasons.append)

    def received(self, rank: int, count: int) -> list[Any]:
        """The next messages for a worker, but for pings."""
        found: list[Any] = []
        while len(found) < count:
            message = receive_blocking(self._sockets[rank])
            found += [message] if isinstance(message, (Submit, Sample)) else []
        return found

    def give(self, rank: int, *returned: Returned) -> None:
        for each in returned:
            send_blocking(self._sockets[rank], packed(each))


def batch_of(num_rows: int) -> ScheduledBatch:
    rows = [ScheduledRow(slot, 0, 1, [], []) for slot in range(num_rows)]
    return ScheduledBatch(0, rows=rows, output_rows=[OutputRow(row, row) for row in range(num_rows)])


def tokens(*ids: int) -> Returned:
    return Returned(StepOutput([[token] for token in ids], [None for _ in ids], [None for _ in ids]))


FAILED = Returned(failure=Failure.of(MemoryError("no memory for it")))


def test_a_step_flows_in_parts_and_comes_back_whole():
    async def test() -> None:
        workers = Workers(num_stages=2)
        step = workers.executor.submit(batch_of(5))
        step.sample()
        for rank in range(2):
            first, second, *samples = workers.received(rank, 4)
            assert [len(first.batch.rows), len(second.batch.rows)] == [3, 2]
            assert samples == [Sample(None)] * 2
        workers.give(0, Returned(), Returned())
        workers.give(1, tokens(10, 11, 12), tokens(13, 14))
        assert (await step.output()).token_ids == [[10], [11], [12], [13], [14]]
        assert step.exclusive
        assert workers.executor.queue_depth == 1
        assert not workers.reasons

    asyncio.run(test())


def test_stages_that_all_fail_a_part_go_on():
    async def test() -> None:
        workers = Workers(num_stages=2)
        step = workers.executor.submit(batch_of(2))
        workers.give(0, FAILED, Returned())
        workers.give(1, FAILED, tokens(1))
        with pytest.raises(MemoryError, match="no memory for it"):
            await step.output()
        assert not workers.reasons
        assert not workers.killed

    asyncio.run(test())


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_stage_that_fails_alone_ends_the_engine(num_stages):
    """It has left what the stage before it sent: the next step would take that for its own. Ranks of one
    stage wait for each other; who fails after that has left nothing."""

    async def test() -> None:
        workers = Workers(num_stages)
        step = workers.executor.submit(batch_of(1))
        workers.give(0, Returned())
        workers.give(1, FAILED)
        with pytest.raises(MemoryError, match="no memory for it"):
            await step.output()
        if num_stages == 1:
            assert not workers.reasons
            return
        assert workers.reasons == ["worker 1 failed a step, which others did not"]
        assert workers.killed == [0, 1]

    asyncio.run(test())


def test_a_part_behind_it_fails_with_the_engine():
    async def test() -> None:
        workers = Workers(num_stages=2)
        step = workers.executor.submit(batch_of(2))
        workers.give(0, Returned())
        workers.give(1, FAILED)
        with pytest.raises(MemoryError):
            await step.output()
        with pytest.raises(EngineDeadError, match="worker 1 failed a step"):
            await step._steps[1].output()  # type: ignore[attr-defined]

    asyncio.run(test())
