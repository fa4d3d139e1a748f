"""Steps as awaitables: the loop stays free, errors come out where they are awaited."""

from __future__ import annotations

import asyncio

import pytest
from helpers.drive import run_step
from helpers.random_runner import make_runner, new_sequence, step_of

from streamllm.runner.executor import Executor
from streamllm.runner.messages import ScheduledBatch, ScheduledRow


@pytest.mark.parametrize("backend", ["cpu", "torch"])
async def test_steps_give_what_the_runner_gives(backend):
    expected = run_step(make_runner(backend=backend), step_of(new_sequence(0, [1, 2, 3], [0])))
    executor = Executor(make_runner(backend=backend))
    await executor.forward(step_of(new_sequence(0, [1, 2, 3], [0])))
    assert await executor.sample() == expected
    for step in range(1, 20):
        executor.submit(
            ScheduledBatch(step, finished_slots=[0], **fields(step_of(new_sequence(0, [1, 2, 3], [step]))))
        )
        await asyncio.sleep(0.002 * (step % 2))  # sometimes it is done before anyone waits
        await executor.forward_done()
        assert await executor.sample() == expected
    executor.close()


def fields(batch: ScheduledBatch) -> dict:
    return {"new_sequences": batch.new_sequences, "rows": batch.rows, "output_rows": batch.output_rows}


async def test_a_step_without_rows_or_outputs_is_complete_at_once():
    executor = Executor(make_runner())
    await executor.forward(ScheduledBatch(0, finished_slots=[1]))
    assert (await executor.sample()).token_ids == []
    prefill = step_of(new_sequence(0, [1, 2, 3], [0]))
    prefill.output_rows = []
    await executor.forward(prefill)
    assert (await executor.sample()).token_ids == []
    executor.close()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
async def test_an_error_surfaces_and_the_next_step_runs(backend):
    executor = Executor(make_runner(backend=backend))
    executor.submit(ScheduledBatch(0, rows=[ScheduledRow(3, 0, 1, [], [])]))
    with pytest.raises(ValueError, match="slot 3 is scheduled but holds no sequence"):
        await executor.forward_done()
    await executor.forward(step_of(new_sequence(0, [1, 2, 3], [0])))
    assert len((await executor.sample()).token_ids[0]) == 1
    executor.close()


async def test_an_error_of_the_running_phase_surfaces(monkeypatch):
    executor = Executor(make_runner())
    wait = executor.runner._backend.wait

    def failing_wait():
        wait()
        raise RuntimeError("the kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(executor.runner._backend, "wait", failing_wait)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            await executor.forward(step_of(new_sequence(0, [1, 2, 3], [0])))
    await executor.forward(step_of(new_sequence(1, [1, 2, 3], [1]), step=1))
    assert len((await executor.sample()).token_ids[0]) == 1
    executor.close()


async def test_the_loop_stays_free_during_a_step():
    runner = make_runner(max_num_batched_tokens=2048, num_blocks=128, max_model_len=2048, threads=1)
    executor = Executor(runner)
    executor.submit(step_of(new_sequence(0, [1] * 2000, list(range(125)))))
    waiter = asyncio.ensure_future(executor.forward_done())
    ticks = 0
    while not waiter.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks > 20
    await waiter
    executor.close()


async def test_a_cancelled_wait_does_not_lose_the_step():
    executor = Executor(make_runner())
    executor.submit(step_of(new_sequence(0, [1] * 60, [0, 1, 2, 3])))
    waiter = asyncio.ensure_future(executor.forward_done())
    await asyncio.sleep(0)
    waiter.cancel()
    await executor.forward_done()
    assert len((await executor.sample()).token_ids[0]) == 1
    executor.submit(ScheduledBatch(1, finished_slots=[0]))
    executor.close()


def test_one_executor_serves_loop_after_loop():
    executor = Executor(make_runner())

    async def one_step(slot: int) -> list[list[int]]:
        await executor.forward(step_of(new_sequence(slot, [1, 2, 3], [slot])))
        return (await executor.sample()).token_ids

    assert asyncio.run(one_step(0)) == asyncio.run(one_step(1))
    executor.close()
