"""Steps as awaitables: the loop stays free, errors come out where they are awaited."""

from __future__ import annotations

import asyncio

import pytest
from helpers.drive import run_step, run_step_on
from helpers.random_runner import make_runner, new_sequence, step_of

from streamllm.runner.executor import Executor
from streamllm.runner.messages import ScheduledBatch, ScheduledRow


@pytest.mark.parametrize("backend", ["cpu", "torch"])
async def test_steps_give_what_the_runner_gives(backend):
    expected = run_step(make_runner(backend=backend), step_of(new_sequence(0, [1, 2, 3], [0])))
    executor = Executor(make_runner(backend=backend))
    assert await run_step_on(executor, step_of(new_sequence(0, [1, 2, 3], [0]))) == expected
    for number in range(1, 20):
        again = fields(step_of(new_sequence(0, [1, 2, 3], [number])))
        step = executor.submit(ScheduledBatch(number, finished_slots=[0], **again))
        assert step.exclusive
        await asyncio.sleep(0.002 * (number % 2))  # sometimes the forward is done before anyone waits
        step.sample()
        assert await step.output() == expected
    executor.close()


def fields(batch: ScheduledBatch) -> dict:
    return {"new_sequences": batch.new_sequences, "rows": batch.rows, "output_rows": batch.output_rows}


async def test_a_step_without_rows_or_outputs_is_complete_at_once():
    executor = Executor(make_runner())
    assert (await run_step_on(executor, ScheduledBatch(0, finished_slots=[1]))).token_ids == []
    prefill = step_of(new_sequence(0, [1, 2, 3], [0]))
    prefill.output_rows = []
    assert (await run_step_on(executor, prefill)).token_ids == []
    executor.close()


@pytest.mark.parametrize("backend", ["cpu", "torch", "gpu", "gpu-graphs"])
async def test_an_error_surfaces_and_the_next_step_runs(backend):
    executor = Executor(make_runner(backend=backend))
    step = executor.submit(ScheduledBatch(0, rows=[ScheduledRow(3, 0, 1, [], [])]))
    step.sample()
    with pytest.raises(ValueError, match="slot 3 is scheduled but holds no sequence"):
        await step.output()
    output = await run_step_on(executor, step_of(new_sequence(0, [1, 2, 3], [0])))
    assert len(output.token_ids[0]) == 1
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
            await run_step_on(executor, step_of(new_sequence(0, [1, 2, 3], [0])))
    output = await run_step_on(executor, step_of(new_sequence(1, [1, 2, 3], [1]), step=1))
    assert len(output.token_ids[0]) == 1
    executor.close()


async def test_the_loop_stays_free_during_a_step():
    runner = make_runner(max_num_batched_tokens=2048, num_blocks=128, max_model_len=2048, threads=1)
    executor = Executor(runner)
    step = executor.submit(step_of(new_sequence(0, [1] * 2000, list(range(125)))))
    step.sample()
    waiter = asyncio.ensure_future(step.output())
    ticks = 0
    while not waiter.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks > 20
    await waiter
    executor.close()


async def test_a_cancelled_wait_does_not_lose_the_step():
    executor = Executor(make_runner())
    step = executor.submit(step_of(new_sequence(0, [1] * 60, [0, 1, 2, 3])))
    step.sample()
    waiter = asyncio.ensure_future(step.output())
    await asyncio.sleep(0)
    waiter.cancel()
    assert len((await step.output()).token_ids[0]) == 1
    executor.submit(ScheduledBatch(1, finished_slots=[0]))
    executor.close()


def test_one_executor_serves_loop_after_loop():
    executor = Executor(make_runner())

    async def one_step(slot: int) -> list[list[int]]:
        return (await run_step_on(executor, step_of(new_sequence(slot, [1, 2, 3], [slot])))).token_ids

    assert asyncio.run(one_step(0)) == asyncio.run(one_step(1))
    executor.close()
