"""Several steps in flight, on the runner's side."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers.drive import GREEDY, generate
from helpers.queued_backend import queued_runner
from helpers.random_runner import make_runner, new_sequence, step_of

from streamllm.runner.executor import Executor
from streamllm.runner.messages import OutputRow, PoolRow, PromptRows, ScheduledBatch, ScheduledRow
from streamllm.runner.token_rules import TokenRules
from streamllm.sampling_params import SamplingParams

PROMPT = [3, 9, 20, 4]


def decode(step: int, position: int, new_token_ids: list[int], **fields: Any) -> ScheduledBatch:
    """The sequence in slot 0 goes on from ``position``."""
    row = ScheduledRow(0, position, 1, new_token_ids, [])
    return ScheduledBatch(step, rows=[row], output_rows=[OutputRow(0, 0)], **fields)


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0, seed=5, logprobs=3)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("delay", [0.0, 0.004])
async def test_each_step_goes_on_from_a_token_that_only_the_backend_knows(params, delay):
    [whole] = generate(make_runner(), [PROMPT], params=params, max_tokens=10)
    executor = Executor(queued_runner(delay=delay))
    assert executor.queue_depth == 2
    in_flight = [executor.submit(step_of(new_sequence(0, PROMPT, [0], params, seed=params.seed or 0)))]
    in_flight[0].sample()
    tokens: list[int] = []
    logprobs = []
    for step in range(1, 10):
        in_flight.append(executor.submit(decode(step, len(PROMPT) + step - 1, tokens[-1:])))
        in_flight[-1].sample()
        output = await in_flight.pop(0).output()
        tokens += output.token_ids[0]
        logprobs += output.logprobs[0] or []
    tokens += (await in_flight[0].output()).token_ids[0]
    assert tokens == whole.output
    assert logprobs == whole.logprobs[:9]
    executor.close()


async def test_outputs_are_each_steps_own_however_late_they_are_read():
    [one] = generate(make_runner(), [PROMPT], max_tokens=2)
    executor = Executor(queued_runner())
    first = executor.submit(step_of(new_sequence(0, PROMPT, [0])))
    first.sample()
    second = executor.submit(decode(1, 4, []))
    second.sample()
    await asyncio.sleep(0.05)
    assert (await first.output()).token_ids == [one.output[:1]]
    assert (await second.output()).token_ids == [one.output[1:]]
    executor.close()


def test_there_is_no_place_for_a_third_step():
    runner = queued_runner()
    steps = [runner.start(step_of(new_sequence(0, PROMPT, [0])))]
    next(runner.sample(step=steps[0]))
    steps.append(runner.start(decode(1, 4, [])))
    next(runner.sample(step=steps[1]))
    assert runner.in_flight == 2
    with pytest.raises(RuntimeError, match="still running"):
        runner.start(decode(2, 5, []))
    for step in steps:
        runner.wait()
        assert len(runner.result(step).token_ids[0]) == 1
    assert runner.in_flight == 0
    runner.close()


async def test_chunks_without_output_return_too():
    [whole] = generate(make_runner(), [PROMPT * 5], max_tokens=1)
    executor = Executor(queued_runner())
    first = step_of(new_sequence(0, PROMPT * 5, [0, 1]))
    first.rows[0].num_tokens, first.output_rows = 12, []
    rest = ScheduledBatch(1, rows=[ScheduledRow(0, 12, 8, [], [])], output_rows=[OutputRow(0, 0)])
    steps = []
    for batch in (first, rest):
        steps.append(executor.submit(batch))
        assert not steps[-1].exclusive
        steps[-1].sample()
    assert (await steps[0].output()).token_ids == []
    assert (await steps[1].output()).token_ids == [whole.output]
    executor.close()


def shifted(prompt_ids: Any, output_ids: Any, logits: np.ndarray) -> np.ndarray:
    return np.roll(logits, 1)


@pytest.mark.parametrize("what", ["prompt logprobs", "pooling", "a logits processor"])
async def test_a_step_with_work_for_the_host_is_exclusive_and_gives_what_it_gives_alone(what):
    batches = []
    for _ in range(2):
        batch = step_of(new_sequence(1, PROMPT * 3, [1], rules=None))
        if what == "prompt logprobs":
            batch.prompt_rows = [PromptRows(0, 1, (PROMPT * 3)[1:], 2)]
        elif what == "pooling":
            batch.pool_rows, batch.output_rows = [PoolRow(0, "mean", True)], []
        else:
            batch.new_sequences[0].rules = TokenRules(processors=(shifted,))
        batches.append(batch)
    expected = make_runner().step(batches[0])
    executor = Executor(queued_runner(delay=0.002))
    before = executor.submit(step_of(new_sequence(0, PROMPT, [0])))
    before.sample()
    step = executor.submit(batches[1])
    assert step.exclusive and not before.exclusive
    step.sample()
    assert len((await before.output()).token_ids[0]) == 1
    output = await step.output()
    assert output.token_ids == expected.token_ids
    for ours, theirs in zip(output.prompt_logprobs, expected.prompt_logprobs, strict=True):
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    for ours, theirs in zip(output.pooled, expected.pooled, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    executor.close()


async def test_an_error_comes_out_of_its_own_step():
    executor = Executor(queued_runner())
    first = executor.submit(step_of(new_sequence(0, PROMPT, [0])))
    first.sample()
    broken = executor.submit(ScheduledBatch(1, rows=[ScheduledRow(3, 0, 1, [], [])]))
    broken.sample()
    assert len((await first.output()).token_ids[0]) == 1
    with pytest.raises(ValueError, match="slot 3 is scheduled but holds no sequence"):
        await broken.output()
    executor.runner._backend.fail_next = [RuntimeError("the device is lost")]
    lost = executor.submit(decode(2, 4, []))
    lost.sample()
    behind = executor.submit(step_of(new_sequence(1, [1, 2, 3], [1]), step=3))
    behind.sample()
    with pytest.raises(RuntimeError, match="the device is lost"):
        await lost.output()
    assert len((await behind.output()).token_ids[0]) == 1
    executor.close()


def test_a_row_beyond_its_tokens_is_refused_where_there_is_no_queue():
    runner = make_runner()
    runner.step(step_of(new_sequence(0, PROMPT, [0])))
    with pytest.raises(ValueError, match="slot 0 is scheduled beyond its last token"):
        runner.start(decode(1, 4, []))
