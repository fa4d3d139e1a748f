"""A worker whose backend takes several steps at once: steps follow each other without waiting."""

from __future__ import annotations

import pytest
import pytest_asyncio
from helpers.drive import GREEDY, generate
from helpers.random_runner import make_runner, new_sequence, step_of
from helpers.tiny_gguf import save_tiny_gguf
from helpers.worker_processes import ForbidToken, load_queued

from streamllm.config import EngineConfig
from streamllm.runner.distributed.startup import start_executor
from streamllm.runner.messages import OutputRow, PromptRows, ScheduledBatch, ScheduledRow
from streamllm.runner.token_rules import TokenRules
from streamllm.sources import resolve

PROMPT = [3, 9, 20, 4]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor(tmp_path_factory):
    path = tmp_path_factory.mktemp("queue") / "m.gguf"
    save_tiny_gguf(path)
    config = EngineConfig(model=str(path), threads=1, distributed_executor_backend="mp")
    files = resolve(str(path))
    executor = start_executor(config, files, load_queued, sampled_vocab_size=10, read_adapter=None)
    executor.start(lambda reason: None)
    yield executor
    executor.close()


def decode(step: int, position: int, new_token_ids: list[int], **fields) -> ScheduledBatch:
    row = ScheduledRow(0, position, 1, new_token_ids, [])
    return ScheduledBatch(step, rows=[row], output_rows=[OutputRow(0, 0)], **fields)


async def end(executor) -> None:
    """The sequence in slot 0 leaves."""
    step = executor.submit(ScheduledBatch(99, finished_slots=[0]))
    step.sample()
    await step.output()


async def test_each_step_goes_on_from_a_token_that_only_the_worker_knows(executor):
    [whole] = generate(make_runner(), [PROMPT], params=GREEDY, max_tokens=10)
    assert executor.queue_depth == 2
    in_flight = [executor.submit(step_of(new_sequence(0, PROMPT, [0])))]
    in_flight[0].sample()
    tokens: list[int] = []
    for step in range(1, 10):
        assert not in_flight[-1].exclusive
        in_flight.append(executor.submit(decode(step, len(PROMPT) + step - 1, tokens[-1:])))
        in_flight[-1].sample()
        tokens += (await in_flight.pop(0).output()).token_ids[0]
    tokens += (await in_flight[0].output()).token_ids[0]
    assert tokens == whole.output
    await end(executor)


async def test_steps_with_work_between_their_phases_are_exclusive(executor):
    judged = step_of(new_sequence(0, PROMPT, [0]))
    judged.prompt_rows.append(PromptRows(0, 1, PROMPT[1:], 0))
    step = executor.submit(judged)
    assert step.exclusive
    step.sample()
    assert len((await step.output()).prompt_logprobs) == 1
    processed = new_sequence(0, PROMPT, [0])
    processed.rules = TokenRules(processors=(ForbidToken(1),))
    batch = step_of(processed)
    batch.finished_slots.append(0)
    step = executor.submit(batch)
    assert step.exclusive
    step.sample()
    [[token]] = (await step.output()).token_ids
    plain = step_of(new_sequence(0, PROMPT, [0]))
    plain.finished_slots.append(0)
    step = executor.submit(plain)
    assert not step.exclusive and token != 1
    step.sample()
    await step.output()
    await end(executor)


async def test_what_a_step_raises_is_its_own(executor):
    lost = executor.submit(decode(0, 4, [7]))
    lost.sample()
    with pytest.raises(ValueError, match="slot 0 is scheduled but holds no sequence"):
        await lost.output()
    step = executor.submit(step_of(new_sequence(0, PROMPT, [0])))
    step.sample()
    assert len((await step.output()).token_ids) == 1
    await end(executor)
